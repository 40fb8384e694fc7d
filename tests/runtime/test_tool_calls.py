"""Calls are found in an output the same however it is cut, and nothing of it is lost or told twice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.tool_calls import Arguments, CallStart, Content, ToolCallParser
from ostinato.runtime.tool_json import ObjectEnd, members
from ostinato.runtime.tool_style import HERMES, LLAMA3, ToolStyle
from tests.scale import scaled

NAMES = frozenset({"f", "get-it"})
Found = list[tuple[str, ...]]

F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NESTED = r'{"a": {"b": [1, "}", "\"]", {"c\\": "<tool_call>"}]}, "é": "\u00e9 😀"}'
HERMES_OUTPUTS: list[tuple[str, Found]] = [
    ("", []),
    ("plain  text\n", [("text", "plain  text\n")]),
    (F, [("call", "f", '{"a": 1}')]),
    ("Let me see.\n\n" + F + "\n", [("text", "Let me see."), ("call", "f", '{"a": 1}')]),
    (F + "\n" + F.replace('"f"', '"get-it"') + " done ", [
        ("call", "f", '{"a": 1}'), ("call", "get-it", '{"a": 1}'), ("text", "done ")]),
    (f'<tool_call>{{"name":"f","arguments":{NESTED}}}</tool_call>', [("call", "f", NESTED)]),
    ('<tool_call>{"name" :"f", "parameters": { } }</tool_call>', [("call", "f", "{ }")]),
    (f'<tool_call>{{"arguments": {NESTED.replace("<tool_call>", "")}, "name": "f"}}</tool_call>', [
        ("call", "f", NESTED.replace("<tool_call>", ""))]),
    ('<tool_call>{"id": "1", "name": "f", "arguments": {"x":[]}, "type": "function"}</tool_call>', [
        ("call", "f", '{"x":[]}')]),
    ('<tool_call>{"name": "f", "arguments": {}, "id": {"}": 1}} \n</tool_call>.', [("call", "f", "{}"), ("text", ".")]),
    ('<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}} and on', [("call", "f", '{"a": 1}'), ("text", "and on")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>on', [("call", "f", '{"a": 1}'), ("text", "on")]),
    # Cut short.
    ('<tool_call>{"name": "f", "arguments": {"a": "1', [("call", "f", '{"a": "1')]),
    (" \n<tool_call>", [("text", " \n<tool_call>")]),
    ("a <tool_ca", [("text", "a <tool_ca")]),
    ('x\n<tool_call>{"name": "f", "argu', [("text", 'x\n<tool_call>{"name": "f", "argu')]),
    # No calls.
    ("a < b <tool> <tool_cal l>", [("text", "a < b <tool> <tool_cal l>")]),
    ("<tool_call>f(1)</tool_call>", [("text", "<tool_call>f(1)</tool_call>")]),
    ("<tool_call>{}</tool_call>", [("text", "<tool_call>{}</tool_call>")]),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', [
        ("text", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": [1]}', [("text", '<tool_call>{"name": "f", "arguments": [1]}')]),
    ('<tool_call>{"name": "f", "arguments": "{}"} ', [("text", '<tool_call>{"name": "f", "arguments": "{}"} ')]),
    ('<tool_call>{"nome": "f", ' + F, [("text", '<tool_call>{"nome": "f",'), ("call", "f", '{"a": 1}')]),
    ('<tool_call>{"name": ' + F, [("text", '<tool_call>{"name":'), ("call", "f", '{"a": 1}')]),
]  # fmt: skip
LLAMA_F = '{"name": "f", "parameters": {"a": 1}}'
LLAMA_OUTPUTS: list[tuple[str, Found]] = [
    ("", []),
    (LLAMA_F, [("call", "f", '{"a": 1}')]),
    (f" \n<|python_tag|>{LLAMA_F}\n", [("call", "f", '{"a": 1}')]),
    (f"{LLAMA_F}; {LLAMA_F}\n{LLAMA_F}", [("call", "f", '{"a": 1}')] * 3),
    (f'{{"name": "f", "parameters": {NESTED}}}', [("call", "f", NESTED)]),
    ('{"type": "function", "name": "f", "parameters": {}}', [("call", "f", "{}")]),
    (f"{LLAMA_F}; so", [("call", "f", '{"a": 1}'), ("text", "; so")]),
    # A call begins an output or is none.
    (f"Well: {LLAMA_F}", [("text", f"Well: {LLAMA_F}")]),
    (' {"a": 1} ', [("text", ' {"a": 1} ')]),
    ('{"name": "x", "parameters": {}}', [("text", '{"name": "x", "parameters": {}}')]),
    ("<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
    ("<|python", [("text", "<|python")]),
    ('{"name": "f', [("text", '{"name": "f')]),
]
OUTPUTS = [(HERMES, *case) for case in HERMES_OUTPUTS] + [(LLAMA3, *case) for case in LLAMA_OUTPUTS]


def new_parser(style: ToolStyle, is_forced: bool = False, at_most_one: bool = False) -> ToolCallParser:
    return ToolCallParser(style, NAMES, is_forced=is_forced, at_most_one=at_most_one)


def found(parser: ToolCallParser, parts: Iterable[str]) -> Found:
    """("text", text) and ("call", name, arguments) in order; neighbouring texts are one."""
    pieces = [piece for part in parts for piece in parser.push(part)]
    result: Found = []
    num_calls = 0
    for piece in pieces + parser.finish():
        match piece:
            case Content(text):
                before = result.pop()[1] if result and result[-1][0] == "text" else ""
                result.append(("text", before + text))
            case CallStart(call, name):
                assert call == num_calls
                num_calls += 1
                result.append(("call", name, ""))
            case Arguments(call, text):
                assert call == num_calls - 1
                kind, name, before = result.pop()
                assert kind == "call"
                result.append((kind, name, before + text))
    assert parser.num_calls == num_calls
    return result


@pytest.mark.parametrize(("style", "text", "expected"), OUTPUTS)
def test_outputs_at_every_cut(style: ToolStyle, text: str, expected: Found) -> None:
    assert found(new_parser(style), [text]) == expected
    assert found(new_parser(style), text) == expected
    for cut in range(len(text)):
        assert found(new_parser(style), [text[:cut], text[cut:]]) == expected
    rng = random.Random(len(text))
    for _ in range(scaled(20, 2000)):
        cuts = sorted(rng.choices(range(len(text) + 1), k=5))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert found(new_parser(style), parts) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>",
    '{"name": "f", "arguments": ', '{"name":"f","parameters":',
    '"name"', '"arguments": {}', "{", "}", "[]", ": ", ",", "; ", " ", "\n", '"', "\\", '"}"', "text", "é",
]  # fmt: skip


@settings(max_examples=scaled(400, 20_000), deadline=None)
@given(st.sampled_from([HERMES, LLAMA3]), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.booleans())
def test_any_output_is_the_same_however_it_is_cut(style: ToolStyle, parts: list[str], at_most_one: bool) -> None:
    whole = found(new_parser(style, at_most_one=at_most_one), ["".join(parts)])
    assert found(new_parser(style, at_most_one=at_most_one), parts) == whole
    assert found(new_parser(style, at_most_one=at_most_one), "".join(parts)) == whole


@settings(max_examples=scaled(200, 5000), deadline=None)
@given(st.text(alphabet="<tol_ca> \n{}\"'ab", max_size=60))
def test_text_without_a_call_comes_out_as_it_went_in(text: str) -> None:
    assert found(new_parser(HERMES), text) == ([("text", text)] if text else [])


def test_arguments_stream_as_they_come_and_nothing_shows_before_a_call_is_sure() -> None:
    parser = new_parser(HERMES)
    assert parser.push("Hm ") == [Content("Hm")]
    assert parser.push("\n<tool") == []
    assert parser.push('_call>\n{"name": "f", "argu') == []
    assert parser.push('ments": {"a') == [CallStart(0, "f"), Arguments(0, '{"a')]
    assert parser.push('": "x') == [Arguments(0, '": "x')]
    assert parser.push('"}}\n</tool') == [Arguments(0, '"}')]
    assert parser.push("_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize(("style", "call"), [(HERMES, F), (LLAMA3, LLAMA_F)])
def test_where_output_is_forced_what_was_cut_short_is_left_out(style: ToolStyle, call: str) -> None:
    first = ("call", "f", '{"a": 1}')
    for cut in range(len(call)):
        calls = found(new_parser(style, is_forced=True), [call + style.joint, call[:cut]])
        assert calls[0] == first
        assert calls[1:] in ([], [("call", "f", calls[-1][2])])
        assert first[2].startswith(calls[-1][2])


@pytest.mark.parametrize(("style", "call"), [(HERMES, F), (LLAMA3, LLAMA_F)])
def test_at_most_one_call(style: ToolStyle, call: str) -> None:
    text = style.joint.join([call, call, "more"])
    assert found(new_parser(style, at_most_one=True), text) == [("call", "f", '{"a": 1}')]


def test_many_half_calls_are_given_up_one_by_one() -> None:
    """Each at the next marker: looked for to the end of the text, this would take minutes."""
    text = '<tool_call>{"name": ' * 3000
    assert found(new_parser(HERMES), [text]) == [("text", text)]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=scaled(200, 5000), deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3), st.text(max_size=5), st.integers(1, 9))
def test_objects_end_and_members_are_what_json_says(table: dict[str, object], rest: str, size: int) -> None:
    text = json.dumps(table, ensure_ascii=False)
    scan, seen, ends = ObjectEnd(), 0, []
    for start in range(0, len(text + rest), size):
        if (end := scan.find((text + rest)[: start + size], start)) >= 0:
            ends.append(end)
            break
        seen = start
    assert ends == [len(text)], seen
    assert {name: json.loads(raw) for name, raw in (members(text) or {}).items()} == table


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a"}', '{"a":}', '{"a":1,}', "{1:2}", '{"a":1} x', "{,}", '{"a":' + "[" * 9000, '{"a" 1}']
)
def test_what_is_no_object_has_no_members(text: str) -> None:
    assert members(text) is None
