"""Model output is data: hostile answers through every parser, in random cuts (SEC-14; T3).

Nothing may escape but pieces, the work is linear, and no call comes out that is not JSON. Work is
counted in executed lines, and in characters that stay unread between two pushes.
"""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.json_scanner import MAX_DEPTH, JsonScanner
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import Piece, ReasoningPiece, TextPiece, ToolCallPiece
from engine.core.parsing.rows import THINK
from engine.core.parsing.tool_formats import ROWS_BY_NAME

NAMES = frozenset({"f", "get_weather"})
# One format of every kind of arguments, and the JSON formats that differ most.
FORMATS: dict[str, ToolFormat] = {
    name: ToolFormat(ROWS_BY_NAME[name], name != "json")
    for name in ("hermes", "llama3", "json", "qwen_xml", "lfm2", "gemma4")
}
MAX_UNREAD = len("<start_function_call>")
NUM_HOSTILE = 3_000

MARKERS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json"),
    *(
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "<|tool_call_start|>[",
        "f(a=",
        "<|tool_call>",
    ),
    *("call:f{", "a:", '<|"|>', "'b\\x41'"),
)
STARTS = ('{"name": "f", "arguments": ', '{"name": "f", "parameters": {"a": ', '{"arguments": ')
ATOMS = (
    *MARKERS,
    *(marker[:-1] for marker in MARKERS),
    *STARTS,
    *("<think>", "</think>", "{", "}", "[", "]", '"', "'", ",", ":", ";", "\\", "\\u", "\\ud800"),
    *("\\udc00", "\ud800", "\udfff", "\x00", "\x1f", "\u2028", "\ufeff", "🙂", "e\u0301", "null"),
    *("NaN", "Infinity", "-", "0x1", "1e999999", "-0", "00", ".5", "9" * 400, "tru", "nul"),
    *("__import__('os').system('x')", "f(", ")", "'''", "#", "//", "/*", "<", ">", "|", " ", "\n"),
    *('"name": "f"', '"name": ["f"]', '"id": {}', "{" * 70, "[" * 70, '{"a":' * 70, '"' * 5),
)


def hostile(rng: random.Random) -> str:
    return "".join(rng.choice(ATOMS) for _ in range(rng.randrange(1, 25)))


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def run(tools: ToolFormat, parts: list[str]) -> list[Piece]:
    parser = OutputParser(tools, NAMES, THINK)
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.push(part)
        assert parser.num_unread < MAX_UNREAD
    return pieces + parser.flush()


def check(pieces: list[Piece], text: str) -> None:
    arguments: dict[int, str] = {}
    num_chars = 0
    for piece in pieces:
        assert isinstance(piece, TextPiece | ReasoningPiece | ToolCallPiece)
        if isinstance(piece, ToolCallPiece):
            assert piece.name is None or piece.name in NAMES
            arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
        else:
            num_chars += len(piece.text)
    assert num_chars <= len(text)
    for written in arguments.values():
        scanner = JsonScanner()
        scanner.feed(written, 0, len(written))
        assert not scanner.bad and written.startswith("{")


@pytest.mark.parametrize("name", FORMATS)
def test_random_hostile_model_output_does_not_break_the_parsers(name: str) -> None:
    rng = random.Random(name)
    for _ in range(NUM_HOSTILE):
        text = hostile(rng)
        check(run(FORMATS[name], cuts(text, rng)), text)


def num_lines(tools: ToolFormat, parts: list[str]) -> int:
    """Lines of our code that a parse executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(tools, parts)
    finally:
        sys.settrace(before)
    return count


LONG = {
    "braces": "{",
    "brackets": "[",
    "markers": "<tool_call>",
    "mistral markers": "[TOOL_CALLS]",
    "tags": "<|python_tag|>",
    "opened calls": '<tool_call>{"name": "f", "arguments": {"a": "',
    "calls in strings": '<tool_call>{"<tool_call>{":"',
    "calls before their names": '[TOOL_CALLS][{"arguments": {"a": 1}, ',
    "small calls": '{"name": "f"};',
    "marked calls": '<tool_call>{"name": "f"}</tool_call>',
    "fences": "```json\n",
    "spaces": " ",
    "half markers": "</tool_cal",
    "ends": "</think>",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit", LONG.values(), ids=LONG)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by_characters"])
def test_parsing_work_grows_linearly(name: str, unit: str, whole: bool) -> None:
    def lines(num_chars: int) -> int:
        text = unit * (num_chars // len(unit))
        return num_lines(FORMATS[name], [text] if whole else list(text))

    assert lines(2000) < 2.5 * lines(1000) + 250


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("opening", ["", "<tool_call>", "[TOOL_CALLS]", *STARTS])
@pytest.mark.parametrize("filler", ["{", "[", "9", '"', "\\", " ", "a"])
def test_long_runs_of_one_character_do_not_break_the_parsers(
    name: str, opening: str, filler: str
) -> None:
    body = filler * 200_000
    text = opening + body
    check(run(FORMATS[name], [opening, body]), text)
    check(run(FORMATS[name], [text[i : i + 10_000] for i in range(0, len(text), 10_000)]), text)


@pytest.mark.parametrize("name", FORMATS)
def test_nesting_of_tool_arguments_is_bounded(name: str) -> None:
    tools = FORMATS[name]
    deepest = 100_000 if tools.row.encoding == "json" else 300
    for depth, complete in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False), (deepest, False)):
        arguments = '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)
        pieces = run(tools, [tools.write([("f", arguments)])])
        made = "".join(p.arguments for p in pieces if isinstance(p, ToolCallPiece))
        assert (made.replace(" ", "") == arguments) is complete
