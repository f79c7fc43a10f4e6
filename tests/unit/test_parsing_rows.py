"""Every row of call formats: the model's own text is read however it is cut, and forced.

`TEXTS` are calls as the families' chat templates render them.
"""

import functools
import json
import random
import re
from collections.abc import Collection, Mapping
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.core.errors import InvalidRequestError
from engine.core.grammar.child import byte_tokenizer, problem_of
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.call_rows import ROWS_BY_NAME
from engine.core.parsing.formats import ToolFormat, known_format
from engine.core.parsing.output import OutputFormat
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import ReasoningPiece, TextPiece, ToolCallPiece
from engine.core.parsing.rows import REASONING_ROWS, THINK, CallRow, ReasoningRow
from engine.core.text.chat_template import ChatTemplate
from tests.unit.test_parsing_grammars import VOCABULARIES, Vocabulary, walk

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "now")
]
SCHEMAS = {tool["function"]["name"]: PARAMETERS for tool in TOOLS}
PARIS: dict[str, Any] = {"city": "Paris", "days": 3}
ODD: dict[str, Any] = {"city": 'a "b"\n<c>'}
CALLS = [("get_weather", PARIS), ("now", ODD)]
BYTES = byte_tokenizer()
REQUIRED, AUTO = ToolChoice("required"), ToolChoice()

_OBJECTS = (
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    r'{"name": "now", "arguments": {"city": "a \"b\"\n<c>"}}',
)
_LISTED = f"[{', '.join(_OBJECTS)}]"
_JSON_ARGUMENTS = ('{"city": "Paris", "days": 3}', r'{"city": "a \"b\"\n<c>"}')


def _dsml(section: str) -> str:
    return (
        f"<｜DSML｜{section}>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n'
        '<｜DSML｜parameter name="city" string="true">a "b"\n<c></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        f"</｜DSML｜{section}>"
    )


def _each(pattern: str, between: str = "") -> str:
    """Both calls by one pattern with the name and the JSON arguments."""
    names = ("get_weather", "now")
    pairs = zip(names, _JSON_ARGUMENTS, strict=True)
    return between.join(pattern.replace("NAME", name).replace("ARGS", args) for name, args in pairs)


TEXTS: dict[str, str] = {
    "apertus": "<|tools_prefix|>[" + _each('{"NAME": ARGS}', ", ") + "]<|tools_suffix|>",
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{_JSON_ARGUMENTS[0]}}},\n"
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": '
        f"{_JSON_ARGUMENTS[1]}}}\n]<|END_ACTION|>"
    ),
    "command_r": (
        'Action:\n```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        f"{_JSON_ARGUMENTS[0]}\n    }},\n"
        '    {\n        "tool_name": "now",\n        "parameters": '
        f"{_JSON_ARGUMENTS[1]}\n    }}\n]```"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>"
        + _each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>",
            "\n",
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_1": (
        "<｜tool▁calls▁begin｜>"
        + _each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_2": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "functionary_v3_1": _each("<function=NAME>ARGS</function>"),
    "functionary_v3_2": _each(">>>NAME\nARGS"),
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}"
        '<end_function_call><start_function_call>call:now{city:<escape>a "b"\n<c><escape>}'
        "<end_function_call>"
    ),
    "functools": f"functools{_LISTED}",
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:now{city:<|"|>a "b"\n<c><|"|>}<tool_call|>'
    ),
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_OBJECTS[0]}",
    "gigachat3_1": f"<|function_call|>{_OBJECTS[0]}",
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        '<tool_call>now\n<arg_key>city</arg_key>\n<arg_value>a "b"\n<c></arg_value>\n</tool_call>'
    ),
    "granite3": f"<|tool_call|>{_LISTED}",
    "granite_20b": f"<function_call> {_OBJECTS[0]}\n<function_call> {_OBJECTS[1]}",
    "harmony": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{_JSON_ARGUMENTS[0]}"
    ),
    "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _OBJECTS),
    "internlm": "\n".join(
        f"<|action_start|><|plugin|>\n{each.replace('arguments', 'parameters')}<|action_end|>"
        for each in _OBJECTS
    ),
    "json": _LISTED,
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_JSON_ARGUMENTS[0]}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>"
        f"{_JSON_ARGUMENTS[1]}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>a "b"\n<c><|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "lfm2": (
        "<|tool_call_start|>[get_weather(city='Paris', days=3), now(city='a \"b\"\n<c>')]"
        "<|tool_call_end|>"
    ),
    "llama4": "[get_weather(city='Paris', days=3), now(city='a \"b\"\\n<c>')]",
    "llama3": _OBJECTS[0].replace("arguments", "parameters"),
    "minicpm5": (
        '<function name="get_weather"><param name="city">Paris</param>'
        '<param name="days">3</param></function>\n'
        '<function name="now"><param name="city">a "b"\n<c></param></function>'
    ),
    "minimax_m1": "<tool_calls>\n" + "\n".join(_OBJECTS) + "\n</tool_calls>",
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>'
        '\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n'
        '<parameter name="city">a "b"\n<c></parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
        "]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="now">]<]minimax[>[<city>a "b"\n<c>]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "mistral": (
        f"[TOOL_CALLS][{_OBJECTS[0][:-1]}, "
        f'"id": "abcdef123"}}, {_OBJECTS[1][:-1]}, "id": "abcdef124"}}]'
    ),
    "mistral_v11": _each("[TOOL_CALLS]NAME[CALL_ID]abcdef123[ARGS]ARGS").replace(
        f"[{_JSON_ARGUMENTS[0]}]", "[ARGS]"
    ),
    "mistral_v13": _each("[TOOL_CALLS]NAME[ARGS]ARGS"),
    "muse": (
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
        "<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
        '<atem:invoke name="now">\n<atem:parameter name="city">a "b"\n<c></atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ),
    "nemotron_v2": f"<TOOLCALL>{_LISTED}</TOOLCALL>",
    "olmo3": (
        '<function_calls>get_weather(city="Paris", days=3)\nnow(city="a \\"b\\"\\n<c>")'
        "</function_calls>"
    ),
    "phi4": f"<|tool_call|>{_LISTED}<|/tool_call|>",
    "pythonic": "[get_weather(city='Paris', days=3), now(city='a \"b\"\\n<c>')]",
    "qwen_xml": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        '<function=now>\n<parameter=city>\na "b"\n<c>\n</parameter>\n</function>\n</tool_call>'
    ),
    "seed": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        '<function=now>\n<parameter=city>a "b"\n<c></parameter>\n</function>\n</seed:tool_call>'
    ),
    "solar": "<|tool_calls|>"
    + _each(
        "<|tool_call:begin|>abcdef123<|tool_call:name|>NAME<|tool_call:args|>ARGS<|tool_call:end|>"
    )
    + "<|calls|>",
    "tool_calls_list": f"<tool_calls>{_LISTED}</tool_calls>",
}
TEXTS["mistral_v11"] = "".join(
    f"[TOOL_CALLS]{name}[CALL_ID]abcdef123[ARGS]{args}"
    for (name, _), args in zip(CALLS, _JSON_ARGUMENTS, strict=True)
)
TEXTS["mistral_v13"] = "".join(
    f"[TOOL_CALLS]{name}[ARGS]{args}"
    for (name, _), args in zip(CALLS, _JSON_ARGUMENTS, strict=True)
)
SINGLE = {"gigachat3", "gigachat3_1", "harmony", "llama3"}
every_row = pytest.mark.parametrize("name", ROWS_BY_NAME)

Joined = tuple[str, list[tuple[str, Any]], str]


def parse(
    row: CallRow, parts: list[str], reasoning: ReasoningRow | None = None, opened: bool = False
) -> Joined:
    """Text, calls with parsed arguments, and reasoning."""
    reasoning = reasoning or row.messages
    parser = OutputParser(ToolFormat(row, True), frozenset(SCHEMAS), reasoning, opened, SCHEMAS)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.flush()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallPiece):
            if piece.name is not None:
                calls.append((piece.name, ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    return text, [(name, json.loads(arguments)) for name, arguments in calls], thoughts


def own_text(name: str) -> tuple[CallRow, str, list[tuple[str, Any]]]:
    """A row, what its model writes after the prompt, and the calls in it."""
    row = ROWS_BY_NAME[name]
    return row, TEXTS[name].removeprefix(row.primed), CALLS[: 1 if name in SINGLE else 2]


def test_every_row_has_a_text() -> None:
    assert TEXTS.keys() == ROWS_BY_NAME.keys()


@every_row
def test_the_models_own_text_is_read_wherever_it_is_cut(name: str) -> None:
    row, text, calls = own_text(name)
    assert parse(row, [text]) == ("", calls, "")
    assert parse(row, list(text)) == ("", calls, "")
    for cut in range(len(text) + 1):
        assert parse(row, [text[:cut], text[cut:]]) == ("", calls, ""), text[:cut]


@every_row
def test_what_is_written_is_read(name: str) -> None:
    row, _, calls = own_text(name)
    written = ToolFormat(row, True).write([(each, json.dumps(args)) for each, args in calls])
    assert parse(row, [written.removeprefix(row.primed)]) == ("", calls, "")


@every_row
def test_text_around_calls_is_kept(name: str) -> None:
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
def test_a_call_that_breaks_off_loses_no_text_behind_it(name: str) -> None:
    row, text, _ = own_text(name)
    place = text.index("Paris")
    broken = text[: place + 3] + "\x00" + text[place + 3 :]
    parser = OutputParser(ToolFormat(row, True), frozenset(SCHEMAS), row.messages, False, SCHEMAS)
    pieces = [*parser.push(broken), *parser.flush()]
    assert any("now" in piece.text for piece in pieces if isinstance(piece, TextPiece)) or (
        parser.num_calls > 0
    )


@functools.lru_cache(maxsize=4)
def compiled(grammar: str) -> LLMatcher:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = compiled(grammar).deep_copy()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@every_row
def test_required_forces_the_models_own_text(name: str) -> None:
    row, text, calls = own_text(name)
    tools = ToolFormat(row, True)
    for parallel in (True, False):
        grammar = tools.grammar(TOOLS, REQUIRED, parallel)
        assert accepts(grammar, text) == (parallel or len(calls) == 1)
        one = tools.write([("get_weather", json.dumps(PARIS))]).removeprefix(row.primed)
        assert accepts(grammar, one)
        for wrong in (
            "",
            "Hi",
            f"Hi {one}",
            one.replace("get_weather", "get"),
            one.replace("3", '"3"'),
            one.replace("3", "x"),
            one.replace("days", "hours"),
            one[: one.index("days")],
        ):
            assert not accepts(grammar, wrong), wrong
    named = tools.grammar(TOOLS, ToolChoice("named", "now"), True)
    assert accepts(named, tools.write([("now", json.dumps(ODD))]).removeprefix(row.primed))
    assert not accepts(named, one)


@every_row
def test_auto_lets_text_and_calls_through(name: str) -> None:
    row, text, _ = own_text(name)
    grammar = ToolFormat(row, True).grammar(TOOLS, AUTO, True)
    plain = "Hi. "
    if row.messages is not None:
        plain = f"{row.messages.finals[0]}Hi. "
    elif row.primed:
        plain = "all\nHi. "
    assert accepts(grammar, text)
    if name != "muse":  # as text, its last message begins like the ones before
        assert accepts(grammar, plain)
    assert not accepts(grammar, text[: text.index("Paris")])
    if not row.bare and row.messages is None:
        assert accepts(grammar, f"{plain}{row.primed}{text}")


WALKED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -9, "maximum": 99},
        "unit": {"$ref": "#/$defs/unit"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "deep": {"type": "object", "properties": {}, "additionalProperties": False},
        "sure": {"type": "boolean"},
    },
    "required": ["count"],
    "$defs": {"unit": {"enum": ["C", "F"]}},
}


# Messages before the calls are free text, which a random walk hardly ever ends.
@pytest.mark.seconds
@pytest.mark.parametrize("name", [name for name, row in ROWS_BY_NAME.items() if not row.messages])
def test_whatever_a_forced_grammar_lets_through_is_calls(name: str) -> None:
    row = ROWS_BY_NAME[name]
    schemas = {"f": WALKED, "g": {"type": "object", "properties": {}}}
    tools = [
        {"type": "function", "function": {"name": each, "parameters": schema}}
        for each, schema in schemas.items()
    ]
    grammar = ToolFormat(row, True).grammar(tools, REQUIRED, True)
    assert grammar is not None and problem_of(grammar, BYTES) is None
    for seed in range(4):
        text = walk(grammar, VOCABULARIES[False], random.Random(seed))
        parser = OutputParser(
            ToolFormat(row, True), frozenset(schemas), row.messages, False, schemas
        )
        pieces = [*parser.push(text), *parser.flush()]
        calls = [piece for piece in pieces if isinstance(piece, ToolCallPiece)]
        assert calls, text
        assert calls == pieces, f"{text!r} has more than calls"
        for first in [piece for piece in calls if piece.name is not None]:
            arguments = "".join(p.arguments for p in calls if p.index == first.index)
            if row.encoding in ("json", "tags"):
                jsonschema.validate(json.loads(arguments), schemas[str(first.name)])
            else:
                assert isinstance(json.loads(arguments), dict)


@every_row
def test_control_tokens_of_a_row_are_shown_and_matched_by_id(name: str) -> None:
    row = ROWS_BY_NAME[name]
    marker = row.trigger or "<none>"
    output = OutputFormat(ToolFormat(row, True), row.messages, {marker: 300, "<other>": 301})
    shown = output.shown_ids(with_tools=True)
    assert shown == ({300} if row.trigger else set())
    assert 301 not in output.shown_ids(with_tools=False)
    if row.trigger and not row.bare and row.messages is None and not row.primed:
        assert "<[300]>" in (output.grammar(TOOLS, REQUIRED, True, None, False) or "")


class Controlled:
    """A vocabulary of bytes and some control tokens."""

    def __init__(self, marks: Collection[str]) -> None:
        self._vocabulary = Vocabulary(False)
        self.control = {mark: self._vocabulary.add_control(mark) for mark in sorted(marks)}

    def accepts(self, grammar: str | None, text: str) -> bool:
        matcher = LLMatcher(self._vocabulary.tokenizer, grammar or "", log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        marks = "|".join(map(re.escape, sorted(self.control, key=len, reverse=True)))
        ids: list[int] = []
        for part in re.split(f"({marks})", text) if marks else [text]:
            ids += [self.control[part]] if part in self.control else list(part.encode())
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@every_row
def test_markers_that_are_control_tokens(name: str) -> None:
    row, text, calls = own_text(name)
    texts = [*row.literals, *((row.messages.close,) if row.messages else ())]
    found = [re.findall(r"<[^<>\s=]+>|\[[A-Z_]+\]", each) for each in texts]
    marks = {mark for each in found for mark in each}
    vocabulary = Controlled(marks)
    output = OutputFormat(ToolFormat(row, True), row.messages, vocabulary.control)
    for choice in (REQUIRED, AUTO):
        grammar = output.grammar(TOOLS, choice, True, None, False)
        assert vocabulary.accepts(grammar, text)
        assert not vocabulary.accepts(grammar, text[: text.index("Paris")])
        assert not vocabulary.accepts(grammar, text.replace("get_weather", "get"))
    plain = row.messages.finals[0] if row.messages else "all\n" if row.primed else ""
    assert vocabulary.accepts(grammar, f"{plain}Hi.")
    assert len(output.shown_ids(with_tools=True)) == len(marks)


def test_control_tokens_within_markers() -> None:
    """A marker that begins with plain text and goes on with a control token."""
    vocabulary = Controlled({"｜DSML｜"})
    row = ROWS_BY_NAME["deepseek_v3_2"]
    output = OutputFormat(ToolFormat(row, True), THINK, vocabulary.control)
    text, takes = TEXTS["deepseek_v3_2"], vocabulary.accepts
    required = output.grammar(TOOLS, REQUIRED, True, None, False)
    assert takes(required, text) and takes(required, f"<think>Hm</think>{text}")
    assert not takes(required, "Hi") and not takes(required, text.replace("city", "town"))
    auto = output.grammar(TOOLS, AUTO, True, None, False)
    for whole in ("Hi.", "a < b", text, f"a <b> {text}", f"<think>Hm</think>\n{text}"):
        assert takes(auto, whole), whole
    assert not takes(auto, f"Hi {text[:60]}")


def test_values_take_the_types_of_the_schema() -> None:
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


def test_strings_are_streamed_before_their_element_ends() -> None:
    row = ROWS_BY_NAME["qwen_xml"]
    parser = OutputParser(ToolFormat(row, True), frozenset(SCHEMAS), None, False, SCHEMAS)
    parser.push("<tool_call>\n<function=now>\n<parameter=city>\n")
    assert parser.push("Par") == [ToolCallPiece(0, "Par")]
    assert parser.push('is "\n') == [ToolCallPiece(0, 'is \\"')]
    assert parser.push("x\n</para") == [ToolCallPiece(0, "\\nx")]


def test_elements_in_elements() -> None:
    row, mark = ROWS_BY_NAME["minimax_m3"], "]<]minimax[>["
    items = f"{mark}<item>1{mark}</item>{mark}<item>x{mark}</item>"
    value = f"{mark}<k>v{mark}</k>{mark}<l>{items}{mark}</l>"
    text = f'{mark}<tool_call>\n{mark}<invoke name="now">{mark}<deep>{value}{mark}</deep>'
    text += f"{mark}</invoke>\n{mark}</tool_call>"
    expected = {"deep": {"k": "v", "l": [1, "x"]}}
    assert parse(row, list(text)) == ("", [("now", expected)], "")


def test_python_and_quoted_literals() -> None:
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


def test_llama_4_writes_python_or_json_with_or_without_markers() -> None:
    row = ROWS_BY_NAME["llama4"]
    for call in ("[now(city='x')]", '{"name": "now", "parameters": {"city": "x"}}'):
        for text in (call, f"<|python_start|>{call}<|python_end|>"):
            assert parse(row, list(text)) == ("", [("now", {"city": "x"})], "")


def test_a_python_tag_may_precede_a_call_in_python() -> None:
    row = ROWS_BY_NAME["llama3"]
    in_json = '{"name": "now", "parameters": {"city": "x"}}'
    for call in ('now.call(city="x")', "now(city='x')", in_json):
        assert parse(row, [f"<|python_tag|>{call}"]) == ("", [("now", {"city": "x"})], "")
    assert parse(row, ["<|python_tag|>print(1)"])[0] == "<|python_tag|>print(1)"


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "mistral_v13", "kimi_k2"])
def test_a_call_in_a_fence_is_read_if_nothing_follows(name: str) -> None:
    row = ROWS_BY_NAME[name]
    for fence in ("```json\n%s\n```", "```\n[%s]\n```\n", "Let me see.\n```json\n%s\n```"):
        text = fence % _OBJECTS[0]
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
def test_reasoning_in_every_marker(row: ReasoningRow) -> None:
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


def test_harmony_channels() -> None:
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
            f" to=functions.now<|channel|>commentary json<|message|>{_JSON_ARGUMENTS[1]}",
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


def test_a_visible_answer_of_functionary() -> None:
    row = ROWS_BY_NAME["functionary_v3_2"]
    assert parse(row, list("all\nHello.")) == ("Hello.", [], "")
    parser = OutputParser(ToolFormat(row, True), frozenset(), None)
    assert [*parser.push("all\nHi"), *parser.flush()] == [TextPiece("Hi")]


def test_strict_tools_in_formats_without_json() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    for name in ("qwen_xml", "lfm2", "gemma4"):
        tools = ToolFormat(ROWS_BY_NAME[name], True)
        with pytest.raises(InvalidRequestError, match="'pattern' can't be enforced"):
            tools.grammar([{"type": "function", "function": function}], REQUIRED, True)
        loose = {"type": "function", "function": {**function, "strict": False}}
        grammar = tools.grammar([loose], REQUIRED, True)
        assert accepts(grammar, tools.write([("f", '{"a": "y"}')]))


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
def test_an_unseen_template_is_classified_by_a_probe(
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
    assert output.tools.native, "the probe told nothing"
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


def test_a_template_that_cannot_be_told_is_emulated() -> None:
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
def test_a_template_with_odd_calls_is_emulated(call: str) -> None:
    source = (
        "{% for t in tools %}{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}{% endfor %}"
    )
    output = OutputFormat.of(source, {}, ChatTemplate(source, "", "").text)
    assert output.tools.name == "json" and not output.tools.native
    assert output.prepare([{"role": "user", "content": "q"}], TOOLS)[1] is None
