"""Output parsing gives the same pieces however the text is split, and loses nothing."""

import json
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.json_scanner import JsonScanner, is_object
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import Piece, ReasoningPiece, ToolCallPiece
from engine.core.parsing.rows import REASONING_ROWS, THINK, ReasoningRow
from engine.core.parsing.tool_formats import JSON, ROWS_BY_NAME

# On a busy machine, how long an example takes means nothing.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = frozenset({"f", "get_weather"})
formats = st.sampled_from([ToolFormat(row, row is not JSON) for row in ROWS_BY_NAME.values()])
json_formats = formats.filter(lambda tools: tools.row.encoding == "json")
# In other formats, even text without calls has markers that are dropped.
plain_formats = formats.filter(lambda tools: not tools.row.messages and not tools.row.primed)
MARKERS = sorted({row.trigger for row in ROWS_BY_NAME.values()} - {""})
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=3)
arguments = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    objects,
    st.booleans(),
    st.none() | st.integers(0, 2),
)
calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)
# Fragments of well-formed and malformed outputs.
fragments = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>"),
            *("</think>", '{"name": "f"', ', "arguments": ', '{"a": 1', '{"a": "b', "}", "{", '"'),
            *("[", "]", ",", ";", " ", "\n", "```", "```json", "f", "<", "null", "1.5e", "\\u00"),
            *('{"name": "f", "arguments": {"a": 1}}', '"name": "get_weather"', "get_weather{}"),
            *MARKERS,
            *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "f(", "a=", "'b'"),
            *('<invoke name="f">', "call:f{", '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>"),
            *("<|message|>", "<|end|>", "<|start|>assistant", "analysis", " to=functions.f"),
        ]
    ),
    max_size=12,
).map("".join)
outputs = fragments | st.builds(
    lambda tools, before, made, after: before + tools.write(made) + after,
    json_formats,
    fragments,
    calls,
    fragments,
)


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted(min(place, len(text)) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def normal(pieces: Sequence[Piece]) -> list[tuple[str, int, str, str]]:
    """Pieces in order, adjacent ones of a kind joined, without the random ids."""
    joined: list[tuple[str, int, str, str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallPiece):
            key = ("call", piece.index, piece.name or "")
            if piece.name is None:
                kind, index, name, so_far = joined.pop()
                assert (kind, index) == ("call", piece.index), "pieces of a call stay together"
                joined.append((kind, index, name, so_far + piece.arguments))
            else:
                joined.append((*key, piece.arguments))
        else:
            kind = "reasoning" if isinstance(piece, ReasoningPiece) else "text"
            if joined and joined[-1][0] == kind:
                joined.append((kind, 0, "", joined.pop()[3] + piece.text))
            else:
                joined.append((kind, 0, "", piece.text))
    return joined


def run(parser: OutputParser, parts: Sequence[str]) -> list[Piece]:
    return [piece for part in parts for piece in parser.push(part)] + parser.flush()


places = st.lists(st.integers(0, 300), max_size=12)
reasonings = st.sampled_from([None, *REASONING_ROWS])


@untimed
@given(formats, outputs, places, reasonings, st.booleans())
def test_parsed_output_is_the_same_for_any_split_of_the_text(
    tools: ToolFormat,
    text: str,
    cuts: Sequence[int],
    reasoning: ReasoningRow | None,
    opened: bool,
) -> None:
    def parser() -> OutputParser:
        return OutputParser(tools, NAMES, reasoning, opened)

    whole = normal(run(parser(), [text]))
    assert normal(run(parser(), cut(text, cuts))) == whole
    assert normal(run(parser(), list(text))) == whole


@untimed
@given(formats, outputs)
def test_parsed_calls_name_known_tools_and_have_object_arguments(
    tools: ToolFormat, text: str
) -> None:
    for kind, _, name, arguments in normal(run(OutputParser(tools, NAMES), [text])):
        if kind == "call":
            assert name in NAMES
            scanner = JsonScanner()
            assert scanner.feed(arguments, 0, len(arguments)) == len(arguments)
            assert not scanner.bad and arguments.startswith("{")
            assert scanner.done == is_object(arguments)


@untimed
@given(json_formats, calls, places)
def test_calls_written_in_a_format_are_parsed_back(
    tools: ToolFormat, made: Sequence[tuple[str, str]], cuts: Sequence[int]
) -> None:
    reasoning = tools.row.messages
    text = tools.write(made).removeprefix(tools.row.primed)
    pieces = normal(run(OutputParser(tools, NAMES, reasoning), cut(text, cuts)))
    assert pieces == [("call", i, name, text) for i, (name, text) in enumerate(made)]


@untimed
@given(plain_formats, outputs, places)
def test_text_without_tool_calls_is_returned_whole(
    tools: ToolFormat, text: str, cuts: Sequence[int]
) -> None:
    """Without a tool's name in the text, nothing can be a call."""
    parser = OutputParser(tools, frozenset({"another"}))
    pieces = normal(run(parser, cut(text, cuts)))
    assert pieces == ([("text", 0, "", text)] if text else [])


@untimed
@given(formats, outputs, places)
def test_the_parser_keeps_no_more_unread_text_than_its_longest_marker(
    tools: ToolFormat, text: str, cuts: Sequence[int]
) -> None:
    parser = OutputParser(tools, NAMES, THINK)
    for part in cut(text, cuts):
        parser.push(part)
        assert parser.num_unread < max(map(len, [*tools.row.literals, "<![CDATA[", "</think>"]))


def is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and the infinities, which Python would accept

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


near_json = st.builds(
    lambda text, at, char: text[: at % (len(text) + 1)] + char + text[at % (len(text) + 1) + 1 :],
    arguments,
    st.integers(0, 500),
    st.sampled_from(list('{}[]",:\\ \n0123456789.eE+-tfnu/\x00\x7f') + ["", "\u00e9", "nul"]),
)


@untimed
@given(arguments | near_json | values.map(json.dumps), places)
def test_scanner_agrees_with_the_json_module(text: str, cuts: Sequence[int]) -> None:
    scanner = JsonScanner()
    rest = ""
    for part in [*cut(text, cuts), " "]:  # the space ends a number
        end = scanner.feed(part, 0, len(part))
        rest += part[end:]
    assert (scanner.done and not rest.strip(" \t\n\r")) == is_json(text)
