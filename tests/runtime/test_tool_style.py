"""What a template teaches of tools, and what a model is told whose template teaches nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime.chat_template import ChatTemplate
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.tokenizer import Tokenizer
from ostinato.runtime.tool_grammar import tool_grammar
from ostinato.runtime.tool_offer import OfferedTools
from ostinato.runtime.tool_prompt import for_template, told
from ostinato.runtime.tool_style import HERMES, LLAMA3, TOLD, ToolStyle, style_of
from ostinato.runtime.wire_tools import Tool, ToolUse
from tests.chat_templates import HERMES_TEMPLATE, LLAMA_TEMPLATE
from tests.serving import CHAT_TEMPLATE
from tests.tokenizers import EOS, EOT, SYS, byte_level

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"é": ["<x>", 1.5, None]}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
]
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def tool(name: str, strict: bool | None = None) -> Tool:
    function = {"name": name, "parameters": INTEGER, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


TOOLS = (tool("f", True), tool("g"))


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (HERMES_TEMPLATE, HERMES), (LLAMA_TEMPLATE, LLAMA3), (CHAT_TEMPLATE, TOLD),
        ("{{ messages }} a template that never heard of a <tool_call> with arguments", TOLD),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=arguments>{% endif %}", TOLD),
        ("{% if tools %}<tool_call>name\n<arg_key>arguments</arg_key>{% endif %}", TOLD),
        ("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{% endif %}", TOLD),
    ],
)  # fmt: skip
def test_styles_are_read_off_templates(template: str, style: ToolStyle) -> None:
    assert style_of(template) == style


def test_styles_say_who_tells_the_model() -> None:
    labels = [HERMES.label, LLAMA3.label, TOLD.label]
    assert labels == ["hermes (template)", "llama3 (template)", "hermes (by a system message)"]


def test_a_template_that_takes_one_call_a_turn_is_found_out() -> None:
    taken = {
        name: ChatTemplate({"default": template}, {}).style.takes_many
        for name, template in (("hermes", HERMES_TEMPLATE), ("llama", LLAMA_TEMPLATE), ("none", CHAT_TEMPLATE))
    }
    assert taken == {"hermes": True, "llama": False, "none": True}


@pytest.mark.parametrize("template", [HERMES_TEMPLATE, LLAMA_TEMPLATE])
@pytest.mark.parametrize("tools", [None, [tool.for_template() for tool in TOOLS]])
def test_calls_and_tools_render_as_in_transformers(template: str, tools: Sequence[Any] | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in CONVERSATIONS:
        right, _ = render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=True, enable_thinking=False
        )
        mine = ChatTemplate({"default": template}, {}).render(
            messages, add_generation_prompt=True, tools=tools, variables={"enable_thinking": False}
        )
        assert mine == right[0]


def test_a_message_is_continued_as_in_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*CONVERSATIONS[1], {"role": "assistant", "content": "Once upon"}]
    right, _ = render_jinja_template([messages], chat_template=HERMES_TEMPLATE, continue_final_message=True)
    template = ChatTemplate({"default": HERMES_TEMPLATE}, {})
    mine = template.render(messages, add_generation_prompt=False, continues_last=True)
    assert mine == right[0]
    assert mine.endswith("<assistant>Once upon")


def test_told_models_see_tools_in_the_system_message_and_calls_as_text() -> None:
    shown = [tool.for_template() for tool in TOOLS]
    for messages in CONVERSATIONS:
        turns = told(messages, shown)
        assert turns[0]["role"] == "system"
        assert all(json.dumps(entry) in turns[0]["content"] for entry in shown)
        assert all(set(turn) == {"role", "content"} for turn in turns)
        assert {turn["role"] for turn in turns[1:]} <= {"user", "assistant"}
    assert told(CONVERSATIONS[1], shown)[0]["content"].startswith("s\n\n#")
    asked, called, answered = told([*CONVERSATIONS[2], RESULT | {"content": "43"}], [])
    assert asked == CONVERSATIONS[2][0]
    call = '<tool_call>\n{"name": "f", "arguments": {"é": ["<x>", 1.5, null]}}\n</tool_call>'
    assert called == {"role": "assistant", "content": call}
    results = "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>"
    assert answered == {"role": "user", "content": results}
    assert told(CONVERSATIONS[1], []) == CONVERSATIONS[1]


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE,
        CHAT_TEMPLATE.replace(
            "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
        ),
    ],
)
def test_where_a_template_takes_no_system_message_the_first_user_tells_of_tools(template: str) -> None:
    style = ChatTemplate({"default": template}, {}).style
    assert style.label == "hermes (by a user message)"
    shown = [tool.for_template() for tool in TOOLS]
    for messages in CONVERSATIONS[0], CONVERSATIONS[2]:
        turns, tools = for_template(style, messages, shown)
        assert tools == ()
        assert turns[0]["role"] == "user"
        assert turns[0]["content"].startswith("# Tools")
        assert turns[0]["content"].endswith("\n\nhi")
        assert turns[1:] == told(messages, [])[1:]


def test_only_told_styles_change_messages() -> None:
    for style in (HERMES, LLAMA3, None):
        assert for_template(style, CONVERSATIONS[2], TOOLS) == (CONVERSATIONS[2], TOOLS)
    messages, shown = for_template(TOLD, CONVERSATIONS[2], [tool.for_template() for tool in TOOLS])
    assert (len(messages), shown) == (4, ())


def fits(source: str, tokenizer: llguidance.LLTokenizer, text: str) -> bool:
    """Whether an output may be this one; two special tokens stand for themselves."""
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(source))
    assert not matcher.is_error(), matcher.get_error()
    special = {"<eot>": EOT, "<sys>": SYS}
    ids: list[int] = []
    for name in special:
        text = text.replace(name, f"\0{name}\0")
    for part in text.split("\0"):
        ids += [special[part]] if part in special else part.encode()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


F, G, BAD_F, BAD_G = ('f {"a": 1}', 'g {"a": 2}', 'f {"b": 1}', 'g {"b": "x"}')
ALWAYS_REFUSED = (BAD_F, 'h {"a": 1}')


@pytest.mark.parametrize("marks", ["text", "special"])
@pytest.mark.parametrize("style", [HERMES, LLAMA3], ids=lambda style: style.name)
@pytest.mark.parametrize(
    ("use", "taken", "refused"),
    [
        (ToolUse(TOOLS, "required"), [[F], [G], [F, G, F]], [[BAD_G], [], ["text"], ["text", F], [F, "text"]]),
        (ToolUse(TOOLS, "required", at_most_one=True), [[F], [G]], [[F, G], [BAD_G], []]),
        (ToolUse(TOOLS, "named", "g", at_most_one=True), [[G]], [[F], [G, G], [BAD_G], [], ["text"]]),
        (ToolUse(TOOLS, "auto"), [[F], [G], [F, G, F], [], ["text"], [BAD_G]], []),
        (ToolUse(TOOLS, "auto", at_most_one=True), [[F], [G], [], ["text"], [BAD_G]], [[F, G]]),
    ],
)
def test_grammars_of_calls(
    tmp_path: Path, use: ToolUse, style: ToolStyle, marks: str, taken: list[list[str]], refused: list[list[str]]
) -> None:
    tokenizer = llguidance.LLTokenizer((byte_level(tmp_path) / "tokenizer.json").read_text(), eos_token=EOS)
    special_ids = {"<tool_call>": EOT, "</tool_call>": SYS} if marks == "special" else {}
    spec = tool_grammar(use, style, special_ids, ServeLimits())
    assert spec is not None
    assert spec.kind == "lark"

    def written(parts: list[str]) -> str:
        text = style.joint.join(part if part == "text" else style.call(*part.split(" ", 1)) for part in parts)
        return text.replace("<tool_call>", "<eot>").replace("</tool_call>", "<sys>") if special_ids else text

    for parts in taken:
        assert fits(spec.source, tokenizer, written(parts)), parts
    for parts in (*refused, *([part] for part in ALWAYS_REFUSED)):
        assert not fits(spec.source, tokenizer, written(parts)), parts


def test_schemas_are_bounded_together() -> None:
    tools = tuple(tool(f"f{number}") for number in range(20))
    with pytest.raises(RequestError, match="1000 bytes") as caught:
        tool_grammar(ToolUse(tools, "required"), HERMES, {}, ServeLimits(max_grammar_bytes=1000))
    assert caught.value.param == "tools"


def test_no_grammar_where_nothing_is_demanded() -> None:
    assert tool_grammar(ToolUse((tool("f"), tool("g", False)), "auto"), HERMES, {}, ServeLimits()) is None


def test_marks_that_are_special_tokens_are_found(tmp_path: Path) -> None:
    """As in checkpoints whose <tool_call> is a special token, which an answer's text leaves out."""
    use = ToolUse(TOOLS, "required")
    folder = byte_level(tmp_path, config={"chat_template": HERMES_TEMPLATE})
    assert OfferedTools(use, Tokenizer(folder)).special_ids == {}
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<eot>", "<tool_call>").replace("<sys>", "</tool_call>"))
    offered = OfferedTools(use, Tokenizer(folder))
    assert offered.special_ids == {"<tool_call>": EOT, "</tool_call>": SYS}
    spec = offered.grammar(ServeLimits())
    assert spec is not None
    tokenizer = llguidance.LLTokenizer(path.read_text(), eos_token=EOS)
    assert fits(spec.source, tokenizer, '<eot>\n{"name": "g", "arguments": {"a": -5}}\n<sys>')
    assert not fits(spec.source, tokenizer, '<tool_call>\n{"name": "g", "arguments": {"a": -5}}\n</tool_call>')
