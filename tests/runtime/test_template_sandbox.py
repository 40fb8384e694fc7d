"""Chat templates can't run for ever, grow without bound or reach out; what they may do is unchanged."""

from __future__ import annotations

import itertools

import jinja2
import pytest

from ostinato.engines.errors import BundleError, RequestError
from ostinato.runtime.chat_template import ChatTemplate
from ostinato.runtime.template_bounds import MAX_TEXT_CHARS
from ostinato.runtime.template_sandbox import RENDER_SECONDS, TemplateSandbox

MANY = "range(9999)"
LONG_LOOPS = {
    "nested": f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}",
    "with a filter": f"{{% for a in {MANY} %}}{{% for b in {MANY} if b < 0 %}}{{% endfor %}}{{% endfor %}}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "in a block": f"{{% generation %}}{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}"
    "{% endgeneration %}",
}
DOUBLED = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s OP ns.s %}{% endfor %}"
LARGE = {
    "repeated": "{{ 'a' * 10**9 }}",
    "repeated the other way": "{{ 10**9 * 'a' }}",
    "a list": "{{ ([0] * 10**9)|length }}",
    "added": DOUBLED.replace("OP", "+"),
    "joined": DOUBLED.replace("OP", "~"),
    "a power": "{{ 10**(10**10) }}",
    "a product": "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a wide field": "{{ '%01000000000d'|format(1) }}",
    "a wide field in braces": "{{ '{:>1000000000}'.format(1) }}",
    "a long field many times": "{{ ('{0}' * 10000).format(messages[0].content * 1000) }}",
    "a field by an operator": "{{ '%1000000000d' % 1 }}",
    "replaced": "{{ ('a' * 10**6).replace('a', 'a' * 1000) }}",
    "replaced by a filter": "{{ ('a' * 1000)|replace('a', 'a' * 10**6) }}",
    "joined by a text": "{{ ('x' * 10**6).join(['a'] * 10**6) }}",
    "joined by a filter": "{{ range(99999)|map('string')|join('x' * 10**6) }}",
    "indented": "{{ 'a\na'|indent(10**9) }}",
    "lists of lists": "{% set a = [0] * 10**6 %}{{ [a] * 10**6 }}",
    "lists of lists as a text": "{% set a = [0] * 10**6 %}{{ ([a] * 10**6)|string|length }}",
    "lists of lists as JSON": "{% set a = [0] * 10**6 %}{{ ([a] * 10**6)|tojson|length }}",
    "printed": f"{{% for a in {MANY} %}}{{{{ messages[0].content }}}}{{% endfor %}}",
}


def rendered(source: str, content: str = "x" * 200) -> str:
    template = ChatTemplate({"default": source}, {})
    return template.render([{"role": "user", "content": content}], add_generation_prompt=True)


@pytest.mark.parametrize("source", LONG_LOOPS.values(), ids=LONG_LOOPS)
def test_time_ends_every_loop(source: str) -> None:
    """On a clock that each look moves on, so that nothing here hangs on how fast the machine is."""
    clock = itertools.count(0.0, RENDER_SECONDS / 1000)
    sandbox = TemplateSandbox(lambda: next(clock))
    sandbox.begin()
    with pytest.raises(jinja2.TemplateError, match="ran for more than 2 s"):
        sandbox.from_string(source).render()
    assert next(clock) < RENDER_SECONDS * 1.1


def test_time_begins_anew_with_each_rendering() -> None:
    now = [0.0]
    sandbox = TemplateSandbox(lambda: now[0])
    template = sandbox.from_string("{% for a in range(3) %}{{ a }}{% endfor %}")
    for _ in range(3):
        sandbox.begin()
        assert template.render() == "012"
        now[0] += RENDER_SECONDS * 2
    with pytest.raises(jinja2.TemplateError):
        template.render()


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_no_text_grows_past_its_bound(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(source)
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_error")
    assert str(MAX_TEXT_CHARS) in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.center(10**9) }}", "{{ '\t'.expandtabs(10**9) }}", "{{ 'a'.translate({97: 'b' * 10**6}) }}",
        "{{ (1).to_bytes(10**9, 'big') }}", "{{ 'a'.encode().zfill(10**9) }}", "{{ lipsum(n=20000) }}",
        "{{ '%*d' % (10**9, 1) }}", "{{ '{:{}}'.format(1, 10**9) }}", "{{ [[1]]|sum(start=[]) }}",
        "{{ 1|tojson(indent=10**9) }}",
    ],
)  # fmt: skip
def test_what_no_template_needs_is_not_there(source: str) -> None:
    with pytest.raises(RequestError, match=r"SecurityError|UndefinedError|BoundError"):
        rendered(source)


def test_a_filter_that_no_template_needs_is_refused_at_start() -> None:
    with pytest.raises(BundleError, match="No filter named 'batch'"):
        rendered("{{ [1]|batch(10**9, 0)|list }}")


def test_a_template_that_calls_itself_for_ever_is_refused() -> None:
    with pytest.raises(RequestError, match="RecursionError"):
        rendered("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__ }}{{ ''.__class__.mro() }}", "{{ self._TemplateReference__context.environment.x }}"]
)
def test_there_is_no_way_out(source: str) -> None:
    with pytest.raises(RequestError, match=r"SecurityError|UndefinedError"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' ~ 1 ~ none ~ [1] }}|{{ 'a' + 'b' }}|{{ 2 * 'ab' }}|{{ 2**10 }}|{{ 1.5 * 2 }}|{{ [1] + [2] }}",
        "{% for a in [1, [2]] recursive %}{% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}{% endif %}{% endfor %}",
        "{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}body{% endcall %}",
        "{% for a in [] %}x{% else %}none{% endfor %}{% for a in range(5) if a % 2 %}{{ loop.index }}{% endfor %}",
        "{{ '%5.1f|%s * %d%%' % (1.25, 'a', 3) }}{{ '%s: {%s}'|format('a', 1) }}{{ '{}: {{{:>4}}}'.format('a', 1) }}",
        "{{ ['a', 1, none]|join(', ') }}{{ ', '.join(['a', 'b']) }}{{ [{'n': 1}]|join('-', attribute='n') }}",
        "{{ 'a b'.replace(' ', '_') }}{{ 'a-b'|replace('-', '') }}{{ 'a\nb'|indent(2) }}{{ 'a'|indent('> ', true) }}",
        "{{ [1, 2]|sum }}{{ [{'n': 1}]|sum(attribute='n') }}{{ {'a': 1}|dictsort }}{{ 'ab cd'|title|trim|length }}",
        "{{ {'a': [1, (2, 3)]}|string }}{{ {'items': 1}['items'] }}{{ {'a': 1}.get('a') }}{{ 'x'|upper|e }}",
        "{% set x = 'p' ~ 'q' %}{% if x == 'pq' and ('a' ~ 'b') in ['ab'] %}yes{% endif %}{{ ('a' ~ 'b')|upper }}",
    ],
)
def test_what_templates_do_comes_out_as_in_plain_jinja(source: str) -> None:
    assert rendered(source) == jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source).render()
