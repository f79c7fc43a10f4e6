"""Chat templates: what they see, what they may use, and what becomes a control token."""

from datetime import datetime

import pytest

from engine.core.errors import InvalidRequestError, ModelFormatError
from engine.core.text.chat_template import ChatTemplate
from engine.core.text.tokenizer import SpecialTokens
from tests.support.files.tokenizer_files import TEMPLATE

SPECIALS = SpecialTokens({"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<s>": 3})
HELLO = [{"role": "user", "content": "hello"}]


def text_of(source: str, messages: list[dict[str, object]] = HELLO, **options: object) -> str:
    template = ChatTemplate(source, bos="<s>", eos="<|im_end|>")
    segments = template.render(messages, SPECIALS, **options).segments
    return "".join(s if isinstance(s, str) else f"#{s}#" for s in segments)


def test_a_conversation_becomes_text_segments_and_control_ids() -> None:
    template = ChatTemplate(TEMPLATE, bos="<s>", eos="<|im_end|>")
    rendered = template.render(HELLO, SPECIALS)
    assert rendered.segments == (1, "user\nhello", 2, "\n", 1, "assistant\n")
    rendered = template.render(HELLO, SPECIALS, add_generation_prompt=False)
    assert rendered.segments == (1, "user\nhello", 2, "\n")


def test_templates_see_bos_eos_tools_and_options() -> None:
    assert text_of("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "#3#hello#2#"
    assert text_of("{{ tools is none }}") == "True"
    assert text_of("{{ tools[0].name }}", tools=[{"name": "clock"}]) == "clock"
    assert text_of("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_hugging_face_template_features_are_supported() -> None:
    """Block trimming, JSON, dates, loop control, namespaces and the training tag."""
    assert text_of("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert text_of("{{ {'b': 'é', 'a': [1]} | tojson }}") == '{"b": "é", "a": [1]}'
    assert text_of("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert text_of("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert (
        text_of("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert text_of("{% generation %}a{{ 1 }}{% endgeneration %}") == "a1"
    source = (
        "{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}"
    )
    assert text_of(source + "{{ ns.n }}") == "3"
    assert text_of("{% macro m(x, y=2) %}{{ x ~ y }}{% endmacro %}{{ m(1) }}") == "12"
    assert text_of("{{ 'a\nb' | indent(2, true) }}|{{ ['x', 'y'] | join('-') }}") == "  a\n  b|x-y"
    assert text_of("{{ messages | map(attribute='role') | join(',') }}") == "user"
    assert text_of("{% for m in messages if m.role == 'user' %}{{ loop.index }}{% endfor %}") == "1"
    assert text_of("{{ ' a-b '.strip().split('-')[-1] }}{{ 'aXa'.replace('X', 'Y') }}") == "baYa"
    assert text_of("{{ messages[::-1][0]['content'][1:3] }}{{ undefined_name }}") == "el"


def test_a_template_can_refuse_a_conversation() -> None:
    with pytest.raises(InvalidRequestError, match="alternate roles"):
        text_of("{{ raise_exception('alternate roles') }}")


def test_a_failing_template_is_a_client_error() -> None:
    for source in ("{{ 1 + 'a' }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}"):
        with pytest.raises(InvalidRequestError, match="cannot render"):
            text_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x | no_such_filter }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        pytest.param("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", id="deep"),
        pytest.param("x" * (1 << 19), id="long"),
    ],
)
def test_a_template_that_cannot_work_fails_at_load(source: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template"):
        ChatTemplate(source, bos="", eos="").check()


def test_deeply_nested_template_input_is_refused() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="levels deep"):
        text_of("x", tools=deep)


def test_a_model_without_a_template_points_to_completions() -> None:
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        ChatTemplate(None, bos="", eos="").render(HELLO, SPECIALS)


@pytest.mark.parametrize("option", ["messages_", "bos_token", "eos_token", "raise_exception"])
def test_template_options_are_an_allow_list(option: str) -> None:
    with pytest.raises(InvalidRequestError, match="not available") as caught:
        text_of("x", **{option: "y"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("role", ["im_start|><|im_end", "root", "", None])
def test_roles_are_checked_because_templates_build_control_tokens_from_them(role: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.role"):
        text_of("x", [*HELLO, {"role": role, "content": "x"}])


def segments_of(source: str, specials: dict[str, int], **given: object) -> tuple[str | int, ...]:
    given = {"messages": HELLO} | given
    return (
        ChatTemplate(source, bos="", eos="")
        .render(specials=SpecialTokens(specials), **given)
        .segments
    )  # type: ignore[arg-type]


def test_a_word_that_is_a_control_token_stays_text_in_content() -> None:
    specials = {"<|end|>": 1, "EOT": 2}
    said = [{"role": "user", "content": "EOT <"}]
    rendered = segments_of("{{ messages[0].content }}|end|>", specials, messages=said)
    assert rendered == ("EOT <|end|>",)


def test_field_names_in_tools_are_text() -> None:
    tools = [{"<|end|>": "x"}]
    assert segments_of("{{ tools | tojson }}", {"<|end|>": 1}, tools=tools) == (
        '[{"<|end|>": "x"}]',
    )


def test_a_control_token_built_from_a_role_is_one() -> None:
    said = [{"role": "user", "content": "a user"}]
    source = "<|{{ messages[0].role }}|>{{ messages[0].content }}"
    specials = {"<|user|>": 1, "user": 2}
    assert segments_of(source, specials, messages=said) == (1, "a user")


def test_templates_can_split_content() -> None:
    said = [{"role": "assistant", "content": "<think>a</think>b"}]
    source = "{{ messages[0].content.split('</think>')[-1] }}<|end|>"
    assert segments_of(source, {"<|end|>": 1}, messages=said) == ("b", 1)
