"""Ids, bytes and chat prompts of real and toy tokenizers, against transformers and hand-written values."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.errors import BundleError, RequestError
from ostinato.runtime.chat_template import ChatTemplate
from ostinato.runtime.template_bounds import MAX_TEXT_CHARS
from ostinato.runtime.tokenizer import Tokenizer, TokenText
from tests.tokenizers import BOS_PIECE, EOS, EOT, FIRST_BYTE_PIECE, FIRST_PIECE, byte_level, sentencepiece, smollm2

USER = {"role": "user", "content": "What is 12 + 30? <b>&</b> \n ďáb 👩‍🔬"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "42"}, {"role": "user", "content": ""}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {"b": 1, "a": [None]}}}]
# What published templates use: block trimming, loop controls, namespaces, slices, tojson, a training mask.
BUSY_TEMPLATE = """
{%- set ns = namespace(last=-1) -%}
{{ bos_token }}
{% if tools %}
    TOOLS {{ tools | tojson }} {{ tools | tojson(indent=2) }}
{% endif %}
{% for message in messages[::-1] %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {% generation %}<{{ message.role }}>{{ message.content | trim }}{{ eos_token }}{% endgeneration %}

    {% if message.name is defined %}name {{ message.name }}{% endif %}
    {% if loop.index0 == 1 %}{% break %}{% endif %}
{% endfor %}
{{ ns.last }}{{ strftime_now("%Y") | length }}
{% if add_generation_prompt %}<assistant>{% endif %}
"""


@pytest.mark.model
def test_the_real_chat_template_gives_what_transformers_gives(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer(smollm2(tmp_path))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for messages in CONVERSATIONS:
        for prompted in (True, False):
            right = reference.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
            assert tokenizer.apply_chat_template(messages, add_generation_prompt=prompted) == right
    for text in ("", "Hello world", " 12 + 30\n\tx  y", USER["content"], "<|im_start|>user"):
        assert tokenizer.encode(text) == reference.encode(text)
        ids = reference.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.special_ids == frozenset(range(17))


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(tools: list[dict[str, Any]] | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate({"default": BUSY_TEMPLATE}, {"bos_token": "<s>", "eos_token": "</s>"})
    for messages in CONVERSATIONS:
        rendered, _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=BUSY_TEMPLATE,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )
        absent = [{**message, "name": None} for message in messages]
        assert template.render(absent, add_generation_prompt=True, tools=tools) == rendered[0]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", str(MAX_TEXT_CHARS)),
    ],
)
def test_a_failing_template_is_a_request_error(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path, config={"chat_template": template}))
    with pytest.raises(RequestError, match=said) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x" * 50}])
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_error")


def test_no_template_and_no_messages_are_request_errors(tmp_path: Path) -> None:
    plain = Tokenizer(byte_level(tmp_path))
    assert not plain.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        plain.apply_chat_template([USER])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chatty = Tokenizer(tmp_path)
    assert chatty.has_chat_template
    assert chatty.apply_chat_template([{"role": "user", "content": "hi<eot>"}]) == [*b"hi", EOT]
    with pytest.raises(RequestError, match="empty"):
        chatty.apply_chat_template([])


def test_named_templates_and_their_file(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = Tokenizer(byte_level(tmp_path, config={"chat_template": named}))
    assert tokenizer.apply_chat_template([USER]) == [*b"d"]
    assert tokenizer.apply_chat_template([USER], tools=[]) == [*b"d"]
    assert tokenizer.apply_chat_template([USER], tools=TOOLS) == [*b"t"]
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(tmp_path).apply_chat_template([USER]) == [*b"file"]
    with pytest.raises(BundleError, match="'default'"):
        Tokenizer(byte_level(_made(tmp_path / "a"), config={"chat_template": named[1:]}))
    with pytest.raises(BundleError, match="does not compile"):
        Tokenizer(byte_level(_made(tmp_path / "b"), config={"chat_template": "{% if %}"}))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_bos_comes_once(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = Tokenizer(sentencepiece(tmp_path, ["▁x", "▁"], config={"chat_template": template}))
    x = FIRST_PIECE
    assert tokenizer.encode(" x") == [BOS_PIECE, x]
    assert tokenizer.encode("<s> x") == [BOS_PIECE, x]
    assert tokenizer.encode(" x", add_special_tokens=False) == [x]
    assert tokenizer.encode("<s><s> x", add_special_tokens=False) == [BOS_PIECE, BOS_PIECE, x]
    assert tokenizer.apply_chat_template([{"role": "user", "content": " x"}]) == [BOS_PIECE, x, 2]
    assert tokenizer.encode("") == [BOS_PIECE]
    # A tokenizer that adds none leaves the caller's own alone.
    plain = Tokenizer(byte_level(_made(tmp_path / "plain"), config={"bos_token": "<sys>"}))
    assert plain.encode("<sys><sys>a") == [258, 258, 97]


def test_long_text_is_not_cut_and_bad_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    assert tokenizer.encode("abcdefgh <eos>") == [*b"abcdefgh ", EOS]
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


def test_bytes_and_text_of_single_tokens(tmp_path: Path) -> None:
    pieces = Tokenizer(sentencepiece(tmp_path, ["▁true", "true", "▁▁é"]))
    assert pieces.token_text(FIRST_PIECE) == TokenText(" true", b" true")
    assert pieces.token_text(FIRST_PIECE + 1) == TokenText("true", b"true")
    assert pieces.token_bytes(FIRST_PIECE + 2) == "  é".encode()
    parts = [pieces.token_text(FIRST_BYTE_PIECE + byte) for byte in "€".encode()]
    assert parts == [
        ("bytes:\\xe2", b"\xe2"),
        ("bytes:\\x82", b"\x82"),
        ("bytes:\\xac", b"\xac"),
    ]
    assert pieces.token_text(BOS_PIECE) == ("<s>", b"<s>")
    assert pieces.token_bytes(99999) == b""
    plain = Tokenizer(byte_level(_made(tmp_path / "plain"), {300: "ABC"}))
    assert [plain.token_bytes(token_id) for token_id in (0, 32, 255, EOS, 300, 299)] == [
        b"\x00", b" ", b"\xff", b"<eos>", b"ABC", b"",
    ]  # fmt: skip
    assert plain.vocab_size == 301
    assert plain.eos_id == EOS
    assert plain.bos_id is None


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", None), ("tokenizer_config.json", None), ("tokenizer.json", "{}")]
)
def test_a_damaged_folder_is_a_bundle_error(tmp_path: Path, name: str, text: str | None) -> None:
    byte_level(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(BundleError, match="build the bundle again"):
        Tokenizer(tmp_path)


def test_other_threads_run_while_a_large_text_is_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    text = "ab " * 300_000
    reader = threading.Thread(target=tokenizer.encode, args=(text,))
    reader.start()
    num_turns = 0
    while reader.is_alive():
        time.sleep(1e-3)
        num_turns += 1
    assert num_turns > 10  # one or two if the reader kept the interpreter to itself


def test_threads_share_a_tokenizer(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer(byte_level(tmp_path, config={"chat_template": template}))
    wrong: list[str] = []

    def work(name: str) -> None:
        for count in range(200):
            text = f"{name} {json.dumps(count)} é"
            ids: Sequence[int] = tokenizer.apply_chat_template([{"role": "user", "content": text}])
            if not tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text)) == text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
