"""Hostile chat templates: they reach nothing, and they end soon and small (SEC-15; T4)."""

import ast
import resource
from pathlib import Path

import pytest

import engine
from engine.core.errors import EngineError, InvalidRequestError
from engine.core.text.chat_template import ChatTemplate
from engine.core.text.template_sandbox import TemplateProgram
from engine.core.text.tokenizer import SpecialTokens

MESSAGES = [{"role": "user", "content": "hello"}]


def render(source: str) -> str:
    return TemplateProgram(source).render({"messages": MESSAGES})


ESCAPES = (
    "''.__class__",
    "''.__class__.__mro__[1].__subclasses__()",
    "''['__class__']",
    "''|attr('__class__')",
    "messages|map(attribute='__class__')|list",
    "messages|map('attr', '__class__')|list",
    "messages|selectattr('__class__')|list|length / 0",
    "'{0.__class__}'.format(1)",
    "'{0.__class__}'['format'](1)",
    "'{a.__class__}'.format_map({'a': 1})",
    "'%s' % messages",
    "'%c'|format(1)",
    "'%s %s'|format(1)",
    "'%99999999s'|format(1)",
    "'%(a)s'|format({'a': 1})",
    "'{:>99999999}'.format(1)",
    "'{!r}'.format(1)",
    "'{0[0]}'.format([1])",
    "'{} {}'.format(1)",
    "'{}'.format.__globals__",
    "cycler.__init__.__globals__",
    "lipsum.__globals__",
    "joiner.__init__",
    "namespace.__init__.__globals__",
    "namespace().__class__",
    "range.__globals__",
    "raise_exception.__globals__",
    "raise_exception.__code__.co_consts",
    "strftime_now.__code__",
    "self._TemplateReference__context",
    "self.__init__.__globals__",
    "messages.append(1)",
    "messages[:].append(1)",
    "[1].extend([2])",
    "[1].append.__self__",
    "(messages | list).append(1)",
    "messages.__iadd__([1])",
    "messages[0].update({'content': 'x'})",
    "messages[0].pop('content')",
    "messages[0].clear()",
    "(1).to_bytes(1000000000, 'big')",
    "'a'.encode()",
    "'a'.translate({})",
    "(messages|map('upper')).gi_frame.f_globals",
    "config.items()",
    "environment.tick.__globals__",
    "context.environment",
)


@pytest.mark.parametrize("expression", ESCAPES)
def test_template_sandbox_escapes_are_refused(expression: str) -> None:
    with pytest.raises(EngineError):
        print(render("{{ " + expression + " }}"))
    assert MESSAGES == [{"role": "user", "content": "hello"}]


BOMBS = {
    "repeat string": "{{ 'a' * 10**9 }}",
    "repeat reversed": "{{ 10**9 * 'a' }}",
    "repeat list": "{{ ([1] * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{% set ns = namespace(x=10**999) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "center": "{{ 'a' | center(10**9) }}",
    "indent": "{{ 'a' | indent(10**9, true) }}",
    "indent string": "{{ ('\n' * 1000000) | indent('a' * 1000000) }}",
    "json indent": "{{ [1] | tojson(indent=10**9) }}",
    "round": "{{ 5 | round(-10**9) }}",
    "round up": "{{ 5 | round(10**9, 'ceil') }}",
    "range": "{{ range(10**9) | list | length }}",
    "date": "{{ strftime_now('%999999999Y') }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "replace method": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "join": "{{ range(99999) | join('a' * 10**6) }}",
    "join method": "{{ ('a' * 10**6).join(['b'] * 90000) }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling sum": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "nested lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested mappings": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x == ns.x }}",
    "nested namespaces": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "appended lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set y = [] %}"
    "{% set _ = y.append(ns.x) %}{% set _ = y.append(ns.x) %}{% set ns.x = y %}{% endfor %}"
    "{{ ns.x }}",
    "a list in itself": "{% set x = [] %}{% set _ = x.append(x) %}{{ x }}",
    "a list that grows under a loop": "{% set x = [1] %}{% for a in x %}{% set _ = x.append(1) %}"
    "{% endfor %}",
    "format": "{% set x = 'a' * 1000000 %}{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format(x) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}"
    "{% endfor %}{% endfor %}",
    "searches": "{% set r = range(99999) | list %}{{ r | select('in', r) | list | length }}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "wide macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "output": "{% for a in range(99999) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}",
    "output of values": "{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "hidden output": "{% set x %}{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}"
    "{% endset %}",
    "hidden text": "{% set x %}{% for a in range(99999) %}"
    + "a" * 99999
    + "{% endfor %}{% endset %}",
}


@pytest.mark.timeout(20)  # unlimited, each would take minutes or all memory
@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_template_bombs_are_stopped_early_with_little_memory(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(EngineError):
        render(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_a_long_valid_conversation_renders() -> None:
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f" turn {i} " * 20} for i in range(2000)]
    text = TemplateProgram(template).render({"messages": messages})
    assert text.count("<|user|>") == 2000


def test_a_message_of_millions_of_words_is_rendered() -> None:
    template = "{% for m in messages %}{{ '<|' + m['content'] | trim }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 1_500_000}]
    assert len(TemplateProgram(template).render({"messages": messages})) > 7_000_000


def test_templates_can_build_lists_and_format_strings() -> None:
    source = (
        "{% set seen = [] %}{% for m in messages %}{% set _ = seen.append(m.role) %}{% endfor %}"
        "{{ seen | join }}"
    )
    assert render(source) == "user"
    assert render("{{ '<{}:{name}:{0}>{{}}'.format('a', name=2) }}") == "<a:2:a>{}"
    assert render("{{ '%s=%d%%' | format('a', 2) }}") == "a=2%"


def test_template_limits_apply_to_each_rendering_separately() -> None:
    program = TemplateProgram("{{ 'a' * 1000000 }}")
    for _ in range(8):
        assert len(program.render({})) == 10**6


def test_clients_cannot_send_a_chat_template() -> None:
    template = ChatTemplate("fixed", bos="", eos="")
    with pytest.raises(InvalidRequestError):
        template.render(MESSAGES, SpecialTokens({}), chat_template="{{ 1 }}")
    content = [{"role": "user", "content": "{{ 7 * 7 }}{% for x in y %}"}]
    echo = ChatTemplate("{{ messages[0].content }}", bos="", eos="")
    assert echo.render(content, SpecialTokens({})).segments == (content[0]["content"],)


def test_jinja_is_imported_in_one_file() -> None:
    root = Path(engine.__file__).parent
    users = set()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "jinja2" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "jinja2" for name in names):
                users.add(path.relative_to(root).as_posix())
    assert users == {"core/text/template_sandbox.py"}
