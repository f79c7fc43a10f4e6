"""Answers of every family to pieces: calls, text around them, and what only looks like a call."""

import json
from collections.abc import Sequence

import pytest

from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.json_scanner import JsonScanner
from engine.core.parsing.output import OutputFormat
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import Piece, ReasoningPiece, TextPiece, ToolCallPiece
from engine.core.parsing.rows import THINK
from engine.core.parsing.source import Source
from engine.core.parsing.tool_formats import ROWS_BY_NAME

HERMES, LLAMA3, JSON, MISTRAL, MISTRAL_ARGS = (
    ToolFormat(ROWS_BY_NAME[name], name != "json")
    for name in ("hermes", "llama3", "json", "mistral", "mistral_v13")
)
FORMATS: tuple[ToolFormat, ...] = (HERMES, LLAMA3, MISTRAL, JSON)
NAMES = frozenset({"get_weather", "now"})
TOOLS = [{"type": "function", "function": {"name": name}} for name in sorted(NAMES)]
PARIS = '{"city": "Paris"}'

Calls = list[tuple[str, str]]


def joined(pieces: Sequence[Piece]) -> tuple[str, Calls, str]:
    """Text, calls as name and arguments, and reasoning; with the rules of pieces checked."""
    calls: Calls = []
    for piece in pieces:
        if not isinstance(piece, ToolCallPiece):
            assert piece.text, "an empty piece says nothing"
        elif piece.index == len(calls):
            assert piece.name is not None and piece.call_id and piece.arguments == ""
            calls.append((piece.name, ""))
        else:
            assert piece.index == len(calls) - 1, "calls come one after the other"
            assert piece.name is None and piece.call_id is None and piece.arguments
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + piece.arguments)
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    return text, calls, reasoning


def parse(tools: ToolFormat, text: str) -> tuple[str, Calls]:
    """The same whether it comes whole or by characters."""
    whole, single = OutputParser(tools, NAMES), OutputParser(tools, NAMES)
    result = joined([*whole.push(text), *whole.flush()])
    pieces = [piece for char in text for piece in single.push(char)] + single.flush()
    assert joined(pieces) == result
    assert whole.num_calls == single.num_calls == len(result[1])
    return result[:2]


@pytest.mark.parametrize("tools", [*FORMATS, MISTRAL_ARGS])
def test_parser_reads_calls_that_the_format_writes(tools: ToolFormat) -> None:
    calls = [("get_weather", PARIS), ("now", "{}"), ("get_weather", '{"city": "}\\"]"}')]
    for several in (calls[:1], calls):
        assert parse(tools, tools.write(several)) == ("", several)


@pytest.mark.parametrize("tools", FORMATS)
def test_plain_text_is_not_parsed_as_calls(tools: ToolFormat) -> None:
    for text in ("", " \n", "Hello.", ' The set {"name": 1} [x]\n', "[1, 2]", "```python\nx\n```"):
        assert parse(tools, text) == (text, [])


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (HERMES, "<tool_call>\n%s\n</tool_call>"),
        (HERMES, "<tool_call>%s</tool_call>\n\n"),
        (HERMES, "\n<tool_call>%s"),
        (LLAMA3, "%s"),
        (LLAMA3, " <|python_tag|>%s"),
        (MISTRAL, "[TOOL_CALLS] [%s]"),
        (MISTRAL, "[TOOL_CALLS][%s] "),
        (JSON, "%s"),
        (JSON, " [ %s ]"),
        (JSON, "```json\n%s\n```\n"),
        (JSON, "```\n[%s]\n```"),
    ],
)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "get_weather", "arguments": {"city": "Paris"}}', PARIS),
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', PARIS),
        ('{ "type": "function",\n"name":"get_weather","arguments":{"city": "Paris"} }', PARIS),
        ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', PARIS),
        (json.dumps({"name": "get_weather", "arguments": PARIS}), PARIS),
        ('{"name": "get\\u005fweather", "arguments": {}, "id": "a1"}', "{}"),
        ('{"name": "get_weather"}', "{}"),
        ('{"name": "get_weather", "arguments": null}', "{}"),
    ],
)
def test_spelling_variants_of_tool_calls_are_read(
    tools: ToolFormat, text: str, call: str, arguments: str
) -> None:
    assert parse(tools, text % call) == ("", [("get_weather", arguments)])


@pytest.mark.parametrize(
    "broken",
    [
        '{"name": "rm", "arguments": {}}',  # no such tool
        '{"name": "now", "arguments": []}',
        '{"name": "now", "arguments": "no object"}',
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"title": "A JSON answer", "name": "now"}',
        "{'name': 'now'}",
        "{}",
        '{"name": "now"',
        '{"name": "now", "arguments": nul}',
        '{"arguments": {"a": 01}, "name": "now"}',
    ],
)
@pytest.mark.parametrize("tools", FORMATS)
def test_malformed_calls_are_returned_as_text(tools: ToolFormat, broken: str) -> None:
    text = tools.write([("now", "{}")]).replace('{"name": "now", "arguments": {}}', broken)
    text = text.replace('{"name": "now", "parameters": {}}', broken)
    assert parse(tools, text) == (text, [])


def test_text_around_tool_calls_is_returned() -> None:
    call = HERMES.write([("now", "{}")])
    assert parse(HERMES, f"Let me see.\n{call}\n{call}\nDone.") == (
        "Let me see.\n\nDone.",
        [("now", "{}"), ("now", "{}")],
    )
    assert parse(MISTRAL, 'One.[TOOL_CALLS][{"name": "now"}] Two.') == (
        "One. Two.",
        [("now", "{}")],
    )
    assert parse(LLAMA3, 'One. {"name": "now"}')[1] == []
    assert parse(LLAMA3, 'One. <|python_tag|>{"name": "now"}') == ("One. ", [("now", "{}")])


def test_tool_calls_may_lack_separators_or_have_extra_ones() -> None:
    two = [("now", "{}"), ("now", "{}")]
    assert parse(LLAMA3, '{"name": "now"}\n{"name": "now"};') == ("", two)
    assert parse(HERMES, '<tool_call>{"name": "now"}<tool_call>{"name": "now"}') == ("", two)
    assert parse(JSON, '{"name": "now"}\n{"name": "now"}') == ("", two)


def test_mistral_named_calls_with_args_marker_are_read() -> None:
    text = '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}'
    assert parse(MISTRAL, text) == ("", [("now", "{}"), ("get_weather", PARIS)])
    for text in ("[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]now[ARGS]x", "[TOOL_CALLS]nowhere{}"):
        assert parse(MISTRAL, text) == (text, [])


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    good = HERMES.write([("now", "{}")])
    for bad in ("<tool_call>\n", '<tool_call>{"name": "rm"}', '<tool_call>{"name": "no'):
        assert parse(HERMES, f"{bad}\n{good}") == (f"{bad}\n", [("now", "{}")])
    text = '[{"name": "now"}, {"name": "rm"}]'
    assert parse(JSON, text) == (', {"name": "rm"}]', [("now", "{}")])


def test_malformed_arguments_leave_the_call_incomplete() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1, oops}}</tool_call>'
    assert parse(HERMES, text) == ("oops}}</tool_call>", [("now", '{"a": 1, ')])
    assert parse(LLAMA3, '{"name": "now", "parameters": {"a": "b') == ("", [("now", '{"a": "b')])


def test_broken_text_after_the_arguments_does_not_lose_the_call() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1}\n</tool_call>Hi'
    assert parse(HERMES, text) == ("Hi", [("now", '{"a": 1}')])
    assert parse(LLAMA3, '{"name": "now", "parameters": {}, oops') == (", oops", [("now", "{}")])


def test_arguments_are_streamed_while_they_are_generated() -> None:
    parser = OutputParser(HERMES, NAMES)
    assert parser.push('Hi <tool_call>\n{"name": "now", ') == [TextPiece("Hi ")]
    assert parser.push('"arguments": ') == [] and parser.num_calls == 0
    first, second = parser.push('{"a": ')
    assert isinstance(first, ToolCallPiece) and first.name == "now" and parser.num_calls == 1
    assert second == ToolCallPiece(0, '{"a": ')
    assert parser.push('"some te') == [ToolCallPiece(0, '"some te')]
    assert parser.push('xt"}') == [ToolCallPiece(0, 'xt"}')]
    assert parser.push("}\n</tool_call>") == [] == parser.flush()


def test_only_a_possible_marker_prefix_is_held_back() -> None:
    parser = OutputParser(HERMES, NAMES)
    assert parser.push("a <tool") == [TextPiece("a ")]
    assert parser.push("box> <") == [TextPiece("<toolbox> ")]
    assert parser.push("<b") == [TextPiece("<<b")]
    bare = OutputParser(JSON, NAMES)
    assert bare.push('{"tit') == [] and bare.push('le": ') == [TextPiece('{"title": ')]


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.\n", "Yes."),
        (False, "\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (False, " Yes. <think> no", "", " Yes. <think> no"),
        (False, "<thin", "", "<thin"),
        (False, "<think>Hm. </thin", "Hm. </thin", ""),
        (True, "Hm.</think>\n\n Yes.", "Hm.", "Yes."),
        (True, "\nHm. <think> </think>", "Hm. <think> ", ""),
        (True, "Hm", "Hm", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    opened: bool, text: str, reasoning: str, content: str
) -> None:
    for cuts in ([text], list(text)):
        parser = OutputParser(None, frozenset(), THINK, opened)
        assert parser.in_reasoning == opened
        pieces = [piece for cut in cuts for piece in parser.push(cut)]
        assert joined([*pieces, *parser.flush()]) == (content, [], reasoning)
        assert not parser.in_reasoning


def test_call_markers_inside_reasoning_are_ignored() -> None:
    output = OutputFormat.of("<think> {{ tools }} <tool_call>", {"<tool_call>": 7, "</think>": 8})
    call = HERMES.write([("now", "{}")])
    parser = output.parser(TOOLS, ToolChoice(), opened=False)
    pieces = parser.push(f"<think>{call}")
    assert parser.in_reasoning and parser.num_calls == 0
    pieces += [*parser.push(f"</think>\n\n{call}"), *parser.flush()]
    assert joined(pieces) == ("", [("now", "{}")], call)
    assert output.shown_ids(with_tools=True) == {7, 8} and output.shown_ids(False) == {8}


def test_tool_choice_decides_which_calls_are_parsed() -> None:
    output = OutputFormat.of(None, {})
    for choice, num_calls in (
        (ToolChoice("none"), 0),
        (ToolChoice("named", "get_weather"), 0),
        (ToolChoice("named", "now"), 1),
        (ToolChoice("required"), 1),
    ):
        parser = output.parser(TOOLS, choice, opened=False)
        text = joined([*parser.push('{"name": "now"}'), *parser.flush()])[0]
        assert parser.num_calls == num_calls and (text == "") == bool(num_calls)


def test_call_ids_have_the_shape_that_the_template_requires() -> None:
    ids = {MISTRAL.new_call_id() for _ in range(50)}
    assert len(ids) == 50 and all(len(each) == 9 and each.isalnum() for each in ids)
    assert HERMES.new_call_id().startswith("call_")


def test_string_arguments_with_a_lone_surrogate_are_not_a_call() -> None:
    text = r'{"name": "now", "arguments": "{\"a\": \"\ud800\"}"}'
    assert parse(JSON, text) == (text, [])
    whole = r'{"name": "now", "arguments": "{\"a\": \"\ud83e\udd9c\"}"}'
    assert parse(JSON, whole) == ("", [("now", '{"a": "🦜"}')])


@pytest.mark.parametrize("tools", [*FORMATS, MISTRAL_ARGS])
def test_calls_are_the_same_for_every_split_of_the_text(tools: ToolFormat) -> None:
    calls = [("get_weather", '{"city": "\\u00e9\\"}", "n": [-1.5e3, null]}'), ("now", "{}")]
    text = tools.write(calls)
    for cut in range(len(text) + 1):
        parser = OutputParser(tools, NAMES)
        pieces = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.flush()]
        assert joined(pieces)[:2] == ("", calls), cut


GOOD_JSON = (
    *('{"a": 1, "b": [true, false, null]}', '"\\u00e9\\n"', "[]", "{}", "[[1], {}]"),
    *("-0.5e-3", "0", "10", "1E+2", '"\\u00eff"'),
)
BAD_JSON = (
    *('{"a": 1,}', "[1,]", "{,}", '"\\u00e"', '"\\x"', "01", "-", "1.", "1e", "nul", '{"a" 1}'),
    *('{"a": }', "{1: 2}", "[1 2]", '"\n"', "+1", ".5", "[}", '{"a": 1]'),
)


@pytest.mark.parametrize("text", [*GOOD_JSON, *BAD_JSON])
def test_the_json_scanner_works_for_every_split(text: str) -> None:
    for cut in range(len(text) + 1):
        scanner = JsonScanner()
        rest = ""
        for part in (text[:cut], text[cut:], " "):  # the space ends a number
            rest += part[scanner.feed(part, 0, len(part)) :]
        assert (scanner.done and not rest.strip()) == (text in GOOD_JSON), cut


def test_a_word_is_read_up_to_its_length_limit() -> None:
    source = Source()
    source.push("abcdef")
    steps = source.word(3)
    with pytest.raises(StopIteration) as read:
        next(steps)
    assert (read.value.value, source.num_unread) == ("abc", 3)
    source = Source()
    source.push("ab")
    steps = source.word(3)
    next(steps)
    source.push("cdef")
    with pytest.raises(StopIteration) as read:
        next(steps)
    assert (read.value.value, source.num_unread) == ("abc", 3)


def test_arguments_before_the_name_are_stripped_of_whitespace() -> None:
    text = '{"arguments":  {"city": "Paris"}  , "name": "get_weather"}'
    assert parse(HERMES, f"<tool_call>{text}</tool_call>") == ("", [("get_weather", PARIS)])
    given = json.dumps(f" {PARIS}\n")
    text = f'{{"name": "get_weather", "arguments": {given}}}'
    assert parse(HERMES, f"<tool_call>{text}</tool_call>") == ("", [("get_weather", PARIS)])


def test_the_first_of_several_name_keys_names_the_call() -> None:
    text = '{"name": "get_weather", "name": "now", "arguments": {"city": "Paris"}}'
    assert parse(JSON, text) == ("", [("get_weather", PARIS)])


def test_a_closing_code_fence_without_an_opening_one_is_text() -> None:
    call = f'{{"name": "get_weather", "arguments": {PARIS}}}'
    assert parse(JSON, f"{call}\n```") == ("\n```", [("get_weather", PARIS)])
    assert parse(JSON, f"```json\n{call}\n```") == ("", [("get_weather", PARIS)])
