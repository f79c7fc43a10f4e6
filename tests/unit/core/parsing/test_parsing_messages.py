"""Which family a template belongs to, and conversations with tools as templates take them.

The templates are short ones of our own, each in its family's manner.
"""

import copy
import json
from typing import Any

import pytest

from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.output import OutputFormat, prepare_messages
from engine.core.parsing.rows import THINK, reasoning_row
from engine.core.text.chat_template import ChatTemplate
from engine.core.text.tokenizer import SpecialTokens

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{# system #}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
)
QWEN = (
    '{%- if tools %}system: call as <tool_call>\n{"name": <name>, "arguments": <args>}\n'
    "</tool_call>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}={{ call.function.arguments.items() | list }}</tool_call>"
    "{% endfor %}\n{% endfor %}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
LLAMA = (
    "{% if tools is not none %}system: {{ tools | map(attribute='function') | "
    "map(attribute='name') | join }}{% endif %}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>{% if m.tool_calls is defined %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}"
    "<|eot_id|>{% endfor %}"
)
MISTRAL = (
    "{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "[TOOL_CALLS]{{ call.id }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.name }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
GENERIC = (
    "{% if tools %}system: {{ tools | tojson }} answer with "
    '{"name": "f", "arguments": {}}{% endif %}{{ messages[0].content }}'
)
CODER = "{% for tool in tools %}<tool_call><function=f><parameter=p>{% endfor %}system"


@pytest.mark.parametrize(
    ("template", "name", "native"),
    [
        (None, "json", False),
        (PLAIN, "json", False),
        ("{# tools #}tools {{ messages }}", "json", False),
        (QWEN, "hermes", True),
        ("{{ messages }} <tool_call>", "hermes", False),
        (LLAMA, "llama3", True),
        ("{{ messages }} system <|python_tag|>", "llama3", False),
        ("<|start_header_id|>{{ messages }}", "json", False),
        (MISTRAL, "mistral", True),
        (GENERIC, "json", True),
        ("{% for tool in tools %}<|tool|>{{ tool }}{% endfor %}", "json", False),
        (CODER, "qwen_xml", True),
    ],
)
def test_tool_format_is_chosen_by_the_chat_template(
    template: str | None, name: str, native: bool
) -> None:
    found = tool_format(template)
    assert (found.name, found.native) == (name, native)


def test_mistral_args_format_is_chosen_by_its_marker() -> None:
    assert (
        tool_format(MISTRAL).write([("f", "{}")]) == '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    )
    assert tool_format(MISTRAL + "[ARGS]").write([("f", "{}")]) == "[TOOL_CALLS]f[ARGS]{}"


def test_reasoning_markers_are_found_in_the_template() -> None:
    assert reasoning_row(QWEN) == THINK
    assert reasoning_row(PLAIN) is None and reasoning_row(None) is None
    for tail in ("assistant\n<think>\n", "<think>"):
        assert output_of(QWEN).opens_reasoning(tail)
    for tail in ("<think>\n\n</think>\n\n", "assistant\n", ""):
        assert not output_of(QWEN).opens_reasoning(tail)
    assert not output_of(PLAIN).opens_reasoning("<think>")


def output_of(template: str | None) -> OutputFormat:
    render = None if template is None else ChatTemplate(template, "", "").text
    return OutputFormat.of(template, {}, render)


def tool_format(template: str | None) -> ToolFormat:
    return output_of(template).tools


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "…", "parameters": {}}}
    for name in ("weather", "now")
]


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Well?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("call_1", "weather", city="Köln"), call("call_2", "now")],
    },
    result("call_1", "rain"),
    result("call_2", "noon"),
    {"role": "user", "content": "And?"},
]


def render(template: str, talk: list[dict[str, Any]] = TALK) -> str:
    before = copy.deepcopy(talk)
    messages, tools = output_of(template).prepare(talk, TOOLS)
    assert talk == before, "the request is not changed"
    assert all(isinstance(message["content"], str) for message in messages)
    rendered = ChatTemplate(template, "", "").render(messages, SpecialTokens({}), tools=tools)
    return "".join(str(segment) for segment in rendered.segments)


def test_native_templates_get_tools_and_parsed_arguments() -> None:
    text = render(QWEN)
    assert text.count('"function": {"name"') == 2
    assert "assistant: <tool_call>weather=[('city', 'Köln')]</tool_call><tool_call>now=[]" in text
    assert "tool: raintool: noonuser: And?" in text


def test_an_empty_tool_list_is_passed_to_the_template_as_none() -> None:
    for template in (QWEN, PLAIN):
        messages, tools = output_of(template).prepare(TALK[:1], [])
        assert (messages, tools) == (TALK[:1], None)


def test_llama_gets_one_call_per_message() -> None:
    text = render(LLAMA)
    order = ["Well?", '"weather"', "rain", '"now"', "noon", "And?"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert text.count("rain") == text.count("noon") == 1
    said = [TALK[0], TALK[1] | {"content": "Let me look."}, *TALK[2:]]
    messages, _ = prepare_messages(said, TOOLS, tool_format(LLAMA))
    contents = [each["content"] for each in messages if each["role"] == "assistant"]
    assert contents == ["Let me look.", ""]


def test_mistral_gets_short_call_ids_and_tool_names() -> None:
    text = render(MISTRAL)
    first = tool_format(MISTRAL).template_call_id("call_1")
    assert f"[TOOL_CALLS]{first}" in text and f"[TOOL_RESULTS]{first} weatherrain" in text
    assert tool_format(MISTRAL).template_call_id("abcDEF123") == "abcDEF123"


def emulated(talk: list[dict[str, Any]], template: str = PLAIN) -> list[dict[str, Any]]:
    messages, tools = output_of(template).prepare(talk, TOOLS)
    assert tools is None
    return messages


def test_emulated_tools_are_described_in_one_system_message() -> None:
    first, *rest = emulated(TALK)
    assert first["role"] == "system" and [each["role"] for each in rest] == [
        *("user", "assistant", "user")
    ]
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in first["content"]
    merged, *_ = emulated([{"role": "system", "content": "Be brief."}, *TALK])
    assert merged == {"role": "system", "content": f"Be brief.\n\n{first['content']}"}


def test_emulated_calls_and_results_are_rendered_as_text() -> None:
    family: ToolFormat = tool_format(PLAIN)
    _, _, assistant, results = emulated(TALK)
    written = family.write([("weather", '{"city": "Köln"}'), ("now", "{}")])
    assert assistant == {"role": "assistant", "content": written}
    assert results["content"] == "Result of weather:\nrain\n\nResult of now:\nnoon\n\nAnd?"
    with_words = {**TALK[1], "content": "A moment."}
    assert emulated([with_words])[1]["content"] == f"A moment.\n{written}"


def test_emulated_tools_work_without_a_system_role() -> None:
    first = emulated(TALK, NO_SYSTEM)[0]
    assert first["role"] == "user" and first["content"].endswith("\n\nWell?")
    assert render(NO_SYSTEM).startswith("[user]You can use these tools")


def test_emulated_tools_go_to_a_leading_system_message_or_the_first_user_message() -> None:
    late = {"role": "system", "content": "Be brief."}
    first, *rest = emulated([TALK[0], late])
    assert first["role"] == "system" and rest == [TALK[0], late], "a late one stays where it is"
    said, later = emulated([{"role": "assistant", "content": "Hello."}, TALK[0]], NO_SYSTEM)
    assert said["content"] == "Hello." and later["content"].endswith("\n\nWell?")


def test_a_tool_result_keeps_its_own_name() -> None:
    named = {**result("call_1", "rain"), "name": "forecast"}
    assert emulated([*TALK[:2], named])[-1]["content"] == "Result of forecast:\nrain"


def test_a_tool_result_without_its_call_is_rendered() -> None:
    assert emulated([result("lost", "42")])[1]["content"] == "Result of the call:\n42"
    assert "tool: 42" in render(QWEN, [result("lost", "42")])
