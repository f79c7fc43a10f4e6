"""Every row of call formats: the model's own text is read however it is cut."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from engine.core.parsing.formats import ToolFormat, known_format
from engine.core.parsing.output import OutputFormat
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import TextPiece, ToolCallPiece
from engine.core.parsing.rows import REASONING_ROWS, THINK, ReasoningRow
from engine.core.parsing.tool_formats import ROWS_BY_NAME
from engine.core.text.chat_template import ChatTemplate
from tests.support.files.call_texts import (
    AUTO,
    CALLS,
    JSON_ARGUMENTS,
    OBJECTS,
    ODD,
    PARIS,
    REQUIRED,
    SCHEMAS,
    TEXTS,
    TOOLS,
    accepts,
    every_row,
    own_text,
    parse,
)


def test_every_tool_format_has_an_example_text() -> None:
    assert TEXTS.keys() == ROWS_BY_NAME.keys()


@every_row
def test_example_calls_of_every_format_are_parsed_for_every_split(name: str) -> None:
    row, text, calls = own_text(name)
    assert parse(row, [text]) == ("", calls, "")
    assert parse(row, list(text)) == ("", calls, "")
    for cut in range(len(text) + 1):
        assert parse(row, [text[:cut], text[cut:]]) == ("", calls, ""), text[:cut]


@every_row
def test_calls_written_in_every_format_are_parsed_back(name: str) -> None:
    row, _, calls = own_text(name)
    written = ToolFormat(row, True).write([(each, json.dumps(args)) for each, args in calls])
    assert parse(row, [written.removeprefix(row.primed)]) == ("", calls, "")


@every_row
def test_text_around_calls_is_kept_in_every_format(name: str) -> None:
    row, text, calls = own_text(name)
    if row.messages is not None:
        final = row.messages.finals[0]
        before, after = f"{final}Well. {row.messages.close}", f"{row.messages.close}{final}Done."
    elif row.primed:
        before, after = "all\nWell. >>>", ">>>all\nDone."
    elif row.bare:
        before, after = "", " Done."
    else:
        before, after = "Well. ", " Done."
    content, found, _ = parse(row, [f"{before}{text}{after}"])
    assert (content.split(), found) == ([*(["Well."] if before else []), "Done."], calls)


@every_row
def test_a_call_of_an_unknown_tool_stays_text(name: str) -> None:
    row, text, _ = own_text(name)
    text = text.replace("get_weather", "get_whatever").replace("now", "later")
    content, found, _ = parse(row, [text])
    assert not found
    if row.messages is None:
        assert content == row.primed + text
    else:
        assert "Paris" in content
    for cut in range(0, len(text), 7):
        assert parse(row, [text[:cut], text[cut:]])[0] == content


@every_row
def test_a_truncated_call_does_not_lose_the_text_after_it(name: str) -> None:
    row, text, _ = own_text(name)
    place = text.index("Paris")
    broken = text[: place + 3] + "\x00" + text[place + 3 :]
    parser = OutputParser(ToolFormat(row, True), frozenset(SCHEMAS), row.messages, False, SCHEMAS)
    pieces = [*parser.push(broken), *parser.flush()]
    assert any("now" in piece.text for piece in pieces if isinstance(piece, TextPiece)) or (
        parser.num_calls > 0
    )


def test_argument_values_take_the_types_of_the_schema() -> None:
    properties: dict[str, Any] = {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "either": {"type": ["string", "integer"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array"},
        "unit": {"$ref": "#/$defs/unit"},
    }
    schema = {"properties": properties, "$defs": {"unit": {"enum": ["1", "2"]}}}
    written = {"text": "1", "number": "1.5", "flag": "True", "either": "7", "maybe": "null"}
    written |= {"list": "[1, {}]", "unit": "2", "unknown": "5", "free": "5 km"}
    elements = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items()
    )
    text = f"<tool_call>\n<function=f>\n{elements}</function>\n</tool_call>"
    row = ROWS_BY_NAME["qwen_xml"]
    parser = OutputParser(ToolFormat(row, True), frozenset({"f"}), None, False, {"f": schema})
    pieces = [*parser.push(text), *parser.flush()]
    arguments = "".join(each.arguments for each in pieces if isinstance(each, ToolCallPiece))
    assert json.loads(arguments) == {
        **{"text": "1", "number": 1.5, "flag": True, "either": 7, "maybe": None},
        **{"list": [1, {}], "unit": "2", "unknown": 5, "free": "5 km"},
    }


def test_string_arguments_are_streamed_before_their_element_ends() -> None:
    row = ROWS_BY_NAME["qwen_xml"]
    parser = OutputParser(ToolFormat(row, True), frozenset(SCHEMAS), None, False, SCHEMAS)
    parser.push("<tool_call>\n<function=now>\n<parameter=city>\n")
    assert parser.push("Par") == [ToolCallPiece(0, "Par")]
    assert parser.push('is "\n') == [ToolCallPiece(0, 'is \\"')]
    assert parser.push("x\n</para") == [ToolCallPiece(0, "\\nx")]


def test_nested_xml_elements_become_nested_arguments() -> None:
    row, mark = ROWS_BY_NAME["minimax_m3"], "]<]minimax[>["
    items = f"{mark}<item>1{mark}</item>{mark}<item>x{mark}</item>"
    value = f"{mark}<k>v{mark}</k>{mark}<l>{items}{mark}</l>"
    text = f'{mark}<tool_call>\n{mark}<invoke name="now">{mark}<deep>{value}{mark}</deep>'
    text += f"{mark}</invoke>\n{mark}</tool_call>"
    expected = {"deep": {"k": "v", "l": [1, "x"]}}
    assert parse(row, list(text)) == ("", [("now", expected)], "")


def test_python_and_quoted_literals_are_read_as_arguments() -> None:
    row = ROWS_BY_NAME["lfm2"]
    text = (
        "<|tool_call_start|>[now(a=True, b=None, c=[1, 'x', (2,)], d={'k': \"v\\x41\\n\"}, "
        "e=-1.5e3, f='')]<|tool_call_end|>"
    )
    expected = {"a": True, "b": None, "c": [1, "x", [2]], "d": {"k": "vA\n"}, "e": -1500.0, "f": ""}
    assert parse(row, list(text)) == ("", [("now", expected)], "")
    row = ROWS_BY_NAME["gemma4"]
    text = '<|tool_call>call:now{a:{b:[<|"|>x<|"|>,true]},c:null,d:word}<tool_call|>'
    expected = {"a": {"b": ["x", True]}, "c": None, "d": "word"}
    assert parse(row, list(text)) == ("", [("now", expected)], "")


def test_llama_4_calls_are_read_in_python_or_json_with_or_without_markers() -> None:
    row = ROWS_BY_NAME["llama4"]
    for call in ("[now(city='x')]", '{"name": "now", "parameters": {"city": "x"}}'):
        for text in (call, f"<|python_start|>{call}<|python_end|>"):
            assert parse(row, list(text)) == ("", [("now", {"city": "x"})], "")


def test_a_python_tag_may_precede_a_python_call() -> None:
    row = ROWS_BY_NAME["llama3"]
    in_json = '{"name": "now", "parameters": {"city": "x"}}'
    for call in ('now.call(city="x")', "now(city='x')", in_json):
        assert parse(row, [f"<|python_tag|>{call}"]) == ("", [("now", {"city": "x"})], "")
    assert parse(row, ["<|python_tag|>print(1)"])[0] == "<|python_tag|>print(1)"


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "mistral_v13", "kimi_k2"])
def test_a_call_in_a_code_fence_is_read_if_nothing_follows(name: str) -> None:
    row = ROWS_BY_NAME[name]
    for fence in ("```json\n%s\n```", "```\n[%s]\n```\n", "Let me see.\n```json\n%s\n```"):
        text = fence % OBJECTS[0]
        content = text[: text.index("```")]
        assert parse(row, list(text)) == (content, CALLS[:1], "")
        assert parse(row, [text]) == (content, CALLS[:1], "")
        for more in (" And?", f"\n{TEXTS[name]}"):
            calls = CALLS if more.startswith("\n") else []
            found = parse(row, list(text + more))
            assert found[1] == calls and found[0].startswith(text.rstrip()), text + more
    for text in (
        "```python\nprint(1)\n```",
        '```json\n{"title": "x"}\n```',
        '```json\n{"name": "now", "arguments": {"city": "x"',
        "```",
    ):
        assert parse(row, list(text)) == (text, [], "")


@pytest.mark.parametrize("row", [row for row in REASONING_ROWS if not row.channels])
def test_reasoning_is_read_in_every_formats_markers(row: ReasoningRow) -> None:
    calls = ROWS_BY_NAME["hermes"]
    opening, closing = (row.frame[0], row.frame[-1]) if row.frame else ("", "")
    answer = f"{opening}Yes.{closing}"
    for opened, text in (
        (True, f"Hm.{row.close}\n\n{answer}"),
        (False, f"{row.open.rstrip()}\nHm.{row.close}{answer}"),
    ):
        for parts in ([text], list(text)):
            assert parse(calls, parts, row, opened) == ("Yes.", [], "Hm.")
    assert parse(calls, list(f"{row.close}Yes."), row) == ("Yes.", [], "")
    if row.repeats:
        text = f"{row.open}A{row.close}B{row.open}C{row.close}D"
        assert parse(calls, list(text), row) == ("BD", [], "AC")
    output = OutputFormat(ToolFormat(calls, True), row, {})
    grammar = output.grammar(TOOLS, REQUIRED, True, None, True)
    assert accepts(grammar, f"Hm.{row.close}{TEXTS['hermes']}")
    assert not accepts(grammar, f"Hm.{row.close}Yes.")


def test_harmony_channels_are_split_into_reasoning_calls_and_answer() -> None:
    row = ROWS_BY_NAME["harmony"]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = TEXTS["harmony"]
    for text, expected in (
        (f"{thought}<|channel|>final<|message|>Yes.", ("Yes.", [], "Hm.")),
        (f"{thought}{call}<|call|>", ("", CALLS[:1], "Hm.")),
        (
            f"{thought}<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{call}",
            ("Wait.", CALLS[:1], "Hm."),
        ),
        (
            f" to=functions.now<|channel|>commentary json<|message|>{JSON_ARGUMENTS[1]}",
            ("", CALLS[1:], ""),
        ),
        ("<|channel|>commentary to=python<|message|>x = 1", ("x = 1", [], "")),
        ("Plain.", ("Plain.", [], "")),
        ("<|channel|>final", ("<|channel|>final", [], "")),
    ):
        for parts in ([text], list(text)):
            assert parse(row, parts) == expected, text
    output = OutputFormat(ToolFormat(row, True), row.messages, {})
    answer = '%llguidance {}\nstart: "{}"\n'
    grammar = output.grammar([], AUTO, True, answer, False)
    assert accepts(grammar, f"{thought}<|channel|>final <|constrain|>json<|message|>{{}}")
    assert accepts(grammar, "<|channel|>final<|message|>{}") and not accepts(grammar, "{}")
    grammar = output.grammar(TOOLS, AUTO, True, answer, False)
    assert accepts(grammar, thought + call) and accepts(grammar, "<|channel|>final<|message|>{}")
    assert not accepts(grammar, "<|channel|>final<|message|>Hi")


def test_functionarys_visible_answer_is_text() -> None:
    row = ROWS_BY_NAME["functionary_v3_2"]
    assert parse(row, list("all\nHello.")) == ("Hello.", [], "")
    parser = OutputParser(ToolFormat(row, True), frozenset(), None)
    assert [*parser.push("all\nHi"), *parser.flush()] == [TextPiece("Hi")]


# Templates of formats that no row knows. Each writes calls in its own way.
UNSEEN: Mapping[str, str] = {
    "<call>NAME::ARGS</call>": (
        "<call>{{ c.function.name }}::{{ c.function.arguments | tojson }}</call>"
    ),
    "objects": (
        '<use>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "</use>"
    ),
    "elements": (
        '<do fn="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
        '<arg key="{{ k }}">{{ v }}</arg>{% endfor %}</do>'
    ),
    "known": (
        '<{{ \'tool\' }}_call>\n{{ \'{\' }}"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>"
    ),
}


@pytest.mark.parametrize(
    ("call", "section"),
    [
        (call, section)
        for name, call in UNSEEN.items()
        for section in (("", "", ""), ("<all>", "</all>", "\n"), ("[[", "]]", ";"))
        if name != "known" or not section[0]
    ],
)
def test_an_unknown_template_is_classified_by_rendering_a_call(
    call: str, section: tuple[str, str, str]
) -> None:
    before, after, between = section
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>\n"
        "{{ m.content }}{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}"
        "{% if not loop.first %}"
        + between
        + "{% endif %}"
        + call
        + "{% endfor %}"
        + after
        + "{% endif %}<|end|>\n{% endfor %}"
    )
    template = ChatTemplate(source, "", "")
    assert known_format(source) is None
    output = OutputFormat.of(source, {}, template.text)
    assert output.tools.native, "the template was not recognized"
    functions = [{"name": name, "arguments": arguments} for name, arguments in CALLS]
    made = [{"id": "a", "type": "function", "function": function} for function in functions]
    messages = [{"role": "assistant", "content": "", "tool_calls": made}]
    text = template.text(messages, TOOLS).rpartition("<|assistant|>\n")[2].removesuffix("<|end|>\n")
    parser = output.parser(TOOLS, AUTO, False)
    pieces = [piece for char in text for piece in parser.push(char)] + parser.flush()
    found = "".join(each.arguments for each in pieces if isinstance(each, ToolCallPiece))
    assert parser.num_calls == 2 and all(isinstance(each, ToolCallPiece) for each in pieces), text
    assert json.loads(f"[{found.replace('}{', '},{')}]") == [PARIS, ODD]
    assert accepts(output.grammar(TOOLS, REQUIRED, True, None, False), text)


def test_a_template_with_unrecognizable_calls_gets_emulated_tools() -> None:
    for source in (
        "{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}",
        "{% for t in tools %}{{ t }}{% endfor %}{% for m in messages %}{{ m }}{% endfor %}",
        "{% for t in tools %}{{ t }}{% endfor %}{{ raise_exception('no') }}",
    ):
        output = OutputFormat.of(source, {}, ChatTemplate(source, "", "").text)
        assert not output.tools.native and output.tools.name == "json"
    assert THINK in REASONING_ROWS


@pytest.mark.parametrize(
    "call",
    [
        "{name}{args}",
        "{{ c.function.name }}{{ c.function.arguments | tojson }}",
        "<x>{{ c.function.name }}" + " " * 5000 + "{{ c.function.arguments | tojson }}",
        "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}"
        "{{ c.function.name }}",
        "<x>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}{{ v }}>"
        "{% endfor %}",
        "<x {{ c.function.name }} {{ c.function.name }}>{{ c.function.arguments }}",
        "{{ c }}",
        "<x>{{ c.function.arguments | tojson }}{{ c.function.name }}</x>",
    ],
)
def test_a_template_with_ambiguous_calls_gets_emulated_tools(call: str) -> None:
    source = (
        "{% for t in tools %}{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}{% endfor %}"
    )
    output = OutputFormat.of(source, {}, ChatTemplate(source, "", "").text)
    assert output.tools.name == "json" and not output.tools.native
    assert output.prepare([{"role": "user", "content": "q"}], TOOLS)[1] is None
