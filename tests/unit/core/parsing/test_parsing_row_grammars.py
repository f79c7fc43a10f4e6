"""The grammar of every row of call formats: it forces the model's own text."""

import json
import random
import re
from collections.abc import Collection
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.core.errors import InvalidRequestError
from engine.core.grammar.child import problem_of
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.output import OutputFormat
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import ToolCallPiece
from engine.core.parsing.rows import THINK
from engine.core.parsing.tool_formats import ROWS_BY_NAME
from tests.support.files.call_texts import (
    AUTO,
    BYTES,
    ODD,
    PARIS,
    REQUIRED,
    TEXTS,
    TOOLS,
    accepts,
    every_row,
    own_text,
)
from tests.unit.core.parsing.test_parsing_grammars import VOCABULARIES, Vocabulary, walk


@every_row
def test_tool_choice_required_forces_the_formats_own_syntax(name: str) -> None:
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
            tools.write([("get_weather", '{"days": 3}')]).removeprefix(row.primed),
        ):
            assert not accepts(grammar, wrong), wrong
    named = tools.grammar(TOOLS, ToolChoice("named", "now"), True)
    assert accepts(named, tools.write([("now", json.dumps(ODD))]).removeprefix(row.primed))
    assert not accepts(named, one)


@every_row
def test_tool_choice_auto_allows_text_and_calls_in_every_format(name: str) -> None:
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
def test_random_outputs_of_row_grammars_parse_as_valid_calls(name: str) -> None:
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
def test_control_tokens_of_a_format_are_shown_and_matched_by_id(name: str) -> None:
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
def test_markers_that_are_control_tokens_are_matched_by_id(name: str) -> None:
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


def test_control_tokens_within_longer_markers_are_matched() -> None:
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


def test_strict_tools_are_enforced_in_formats_without_json() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    for name in ("qwen_xml", "lfm2", "gemma4"):
        tools = ToolFormat(ROWS_BY_NAME[name], True)
        with pytest.raises(InvalidRequestError, match="'pattern' can't be enforced"):
            tools.grammar([{"type": "function", "function": function}], REQUIRED, True)
        loose = {"type": "function", "function": {**function, "strict": False}}
        grammar = tools.grammar([loose], REQUIRED, True)
        assert accepts(grammar, tools.write([("f", '{"a": "y"}')]))
