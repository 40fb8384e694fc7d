"""Prompts that are filled into a skeleton are those that the template prints."""

from __future__ import annotations

import random

import pytest

from ostinato.engines.errors import RequestError
from ostinato.runtime import template_skeleton
from ostinato.runtime.chat_template import ChatTemplate, Message
from ostinato.runtime.template_sandbox import TemplateSandbox
from ostinato.runtime.template_skeleton import only_pastes
from tests.chat_templates import HERMES_TEMPLATE, LLAMA_TEMPLATE

PASTING = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<s>system\nHi</s>\n' }}"
    "{% endif %}{{'<s>' + message['role'] + '\n' + message['content'] + '</s>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' and not loop.last %}[{{ m.content }}]{% else %}"
    "{{ loop.index ~ '(' ~ m.content ~ ')' ~ m.content }}{% endif %}{% endfor %}{{ messages[0].content }}",
    "{% for m in messages %}{{ m.role }}{% endfor %}no text at all",
)
ASKING = (
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content if loop.first }}{% endfor %}",
    "{% for m in messages %}{{ m.content[0] }}{% endfor %}",
    "{% for m in messages %}{{ (m.content + 'x').upper() }}{% endfor %}",
    "{% for m in messages %}{{ ('a' ~ m.content) == 'ab' }}{% endfor %}",
    "{% for m in messages %}{% set x = m.content %}{{ x }}{% endfor %}",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{% for m in messages %}{{ m['con' ~ 'tent'] }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem }}{% endfor %}",
    "{% for m in messages if m.content %}{{ m.role }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x | length }}",
    "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "{% for m in messages %}{{ raise_exception('no') }}{% endfor %}",
    "{{ messages | tojson }}",
    "{{ strftime_now('%Y') }}",
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
)
TEXTS = ("", "a text", "{{ bos_token }}", "\ue0001\ue000", "\ue000", "\n", "Straße 🙂", "<s>")


def conversation(source: random.Random) -> list[Message]:
    roles = ("system", "user", "assistant", "tool")
    return [
        {"role": source.choice(roles), "content": source.choice(TEXTS)} for _ in range(source.choice((1, 1, 2, 3, 9)))
    ]


@pytest.mark.parametrize("source", PASTING)
def test_a_filled_skeleton_is_what_the_template_prints(source: str) -> None:
    template = ChatTemplate({"default": source}, {"bos_token": "<b>"})
    assert template._skeletons is not None
    chance = random.Random(1)
    for _ in range(500):
        messages, asks = conversation(chance), chance.random() < 0.5
        assert template.render(messages, add_generation_prompt=asks) == template._rendered(messages, asks)
    assert 0 < len(template._skeletons._kept) <= template_skeleton._MAX_KEPT


@pytest.mark.parametrize("source", ASKING)
def test_a_template_that_does_more_with_a_text_has_none(source: str) -> None:
    assert not only_pastes(TemplateSandbox().parse(source))
    assert ChatTemplate({"default": source}, {})._skeletons is None


def test_messages_with_more_than_a_text_are_rendered() -> None:
    template = ChatTemplate({"default": PASTING[0]}, {})
    assert template._skeletons is not None
    user = {"role": "user", "content": "a"}
    for messages in (
        [{**user, "name": "b"}],
        [{"role": "user", "content": 7}],
        [{"role": "\ue0000\ue000", "content": "a"}],
        [user] * 65,
        [{"role": "user", "content": "a" * 2**16}, user],
    ):
        assert template._skeletons.fill(messages, True) is None
    with pytest.raises(RequestError, match="chat template refused"):
        template.render([{"role": "user", "content": 7}])
    assert template.render([{**user, "name": "b"}]) == template.render([user])


def test_a_prompt_is_as_long_as_the_sandbox_allows() -> None:
    """Which each text may be in many times."""
    template = ChatTemplate({"default": "{% for m in messages %}" + "{{ m.content }}" * 32 + "{% endfor %}"}, {})
    assert template._skeletons is not None
    for extra in (0, 1):
        messages = [{"role": "user", "content": "a" * (2**15 + extra)}]
        if extra:
            with pytest.raises(RequestError, match="render to more than 1048576 characters"):
                template.render(messages)
        else:
            assert template.render(messages) == template._rendered(messages, True)


def test_no_more_is_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_skeleton, "_MAX_KEPT", 3)
    template = ChatTemplate({"default": PASTING[0]}, {})
    assert template._skeletons is not None
    for count in range(1, 9):
        template.render([{"role": "user", "content": "a"}] * count)
        assert len(template._skeletons._kept) <= 3
