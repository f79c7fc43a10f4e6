"""Grammars of every family, walked with llguidance over a vocabulary of bytes and a few longer
tokens; and what they let through, read back by the family's parser.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.core.errors import InvalidRequestError
from engine.core.grammar.child import byte_tokenizer, problem_of
from engine.core.grammar.schema_rules import compile_schema
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing import grammars
from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.grammars import arguments_rule, with_reasoning
from engine.core.parsing.output import OutputFormat
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.pieces import ToolCallPiece
from engine.core.parsing.rows import THINK
from engine.core.parsing.tool_formats import ROWS_BY_NAME

HERMES, LLAMA3, JSON, MISTRAL, MISTRAL_ARGS = (
    ToolFormat(ROWS_BY_NAME[name], name != "json")
    for name in ("hermes", "llama3", "json", "mistral", "mistral_v13")
)
FORMATS: tuple[ToolFormat, ...] = (HERMES, LLAMA3, JSON, MISTRAL, MISTRAL_ARGS)
MARKED = (HERMES, MISTRAL, MISTRAL_ARGS)

EOS = 256
CONTROL = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<think>", "</think>"),
)
# Tokens that end in the midst of one rule and begin in another.
LONGER = (
    "}}",
    '"}',
    "{}}",
    "}}\n</",
    '>\n{"',
    "k>\n\n",
    'k>\n\n{"',
    "]}",
    '[{"',
    "x<tool",
    '}, {"',
)

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -9, "maximum": 99},
        "unit": {"$ref": "#/$defs/unit"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["count"],
    "$defs": {"unit": {"enum": ["C", "F", "}]</tool_call>"]}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get"}},
]
COUNT = ("get_weather", '{"count": 1}')
EMPTY = ("get", "{}")
AUTO, REQUIRED, NAMED = ToolChoice(), ToolChoice("required"), ToolChoice("named", "get")


class Vocabulary:
    """Bytes, end of text, control tokens (if asked for) and some longer tokens."""

    def __init__(self, has_control: bool) -> None:
        control = CONTROL if has_control else ()
        texts = ["<eos>", *control, *LONGER]
        self.tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts]
        self.special_token_ids = list(range(EOS, EOS + 1 + len(control)))
        self.eos_token_id, self.bos_token_id = EOS, None
        self.control = {text: EOS + 1 + index for index, text in enumerate(control)}
        first = EOS + 1 + len(control)
        self.longer = {text: first + index for index, text in enumerate(LONGER)}
        self.tokenizer = LLTokenizer(llguidance.TokenizerWrapper(self))

    def add_control(self, text: str) -> int:
        """Add a control token. Returns its id."""
        self.tokens.append(text.encode())
        self.special_token_ids.append(len(self.tokens) - 1)
        self.tokenizer = LLTokenizer(llguidance.TokenizerWrapper(self))
        return len(self.tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def encode(self, text: str, rng: random.Random) -> list[int]:
        """Control tokens always, longer tokens now and then, bytes for the rest."""
        ids: list[int] = []
        marks = "|".join(map(re.escape, self.control)) or r"(?!)"
        for part in re.split(f"({marks})", text):
            if part in self.control:
                ids.append(self.control[part])
                continue
            while part:
                found = [each for each in self.longer if part.startswith(each)]
                if found and rng.random() < 0.7:
                    taken = rng.choice(found)
                    ids.append(self.longer[taken])
                else:
                    taken = part[0]
                    ids += taken.encode()
                part = part[len(taken) :]
        return ids


VOCABULARIES = {has_control: Vocabulary(has_control) for has_control in (False, True)}


def accepts(grammar: str | None, text: str, control: Mapping[str, int] | None = None) -> bool:
    """Whether the grammar takes the whole text, which must not depend on how it is tokenized."""
    assert grammar is not None
    vocabulary = VOCABULARIES[bool(control)]
    fresh = LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
    assert not fresh.is_error(), fresh.get_error()
    answers = set()
    for seed in range(5):
        matcher = fresh.deep_copy()
        ids = vocabulary.encode(text, random.Random(seed))
        answers.add(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    assert len(answers) == 1
    return answers.pop()


@pytest.fixture(params=[False, True], ids=["text", "control"])
def control(request: pytest.FixtureRequest) -> Mapping[str, int]:
    return VOCABULARIES[request.param].control


@pytest.mark.parametrize("tools", FORMATS)
def test_tool_choice_required_allows_only_calls(
    tools: ToolFormat, control: Mapping[str, int]
) -> None:
    several = tools.write([COUNT, EMPTY])
    for parallel in (True, False):
        grammar = tools.grammar(TOOLS, REQUIRED, parallel, control)
        assert accepts(grammar, tools.write([COUNT]), control)
        assert accepts(grammar, tools.write([EMPTY]), control)
        assert accepts(grammar, several, control) == parallel
        for text in ("", "Hi", f"Hi {several}", f"{tools.write([EMPTY])}Hi"):
            assert not accepts(grammar, text, control)


@pytest.mark.parametrize("tools", FORMATS)
def test_grammars_enforce_tool_names_and_argument_schemas(
    tools: ToolFormat, control: Mapping[str, int]
) -> None:
    for choice in (REQUIRED, AUTO):
        grammar = tools.grammar(TOOLS, choice, True, control)
        for name, arguments in (
            ("get_weather", "{}"),
            ("get_weather", '{"count": "1"}'),
            ("get_weather", '{"count": 1, "unit": "K"}'),
            ("get_weather", '{"count": 1, "more": 2}'),
            ("get", '{"count": 1}'),
            ("rm", "{}"),
        ):
            assert not accepts(grammar, tools.write([(name, arguments)]), control)
        assert accepts(
            grammar, tools.write([("get_weather", '{"count": 1, "unit": "C"}')]), control
        )


@pytest.mark.parametrize("tools", FORMATS)
def test_tool_choice_named_allows_one_call_of_that_tool(
    tools: ToolFormat, control: Mapping[str, int]
) -> None:
    grammar = tools.grammar(TOOLS, NAMED, True, control)
    assert accepts(grammar, tools.write([EMPTY]), control)
    for calls in ([COUNT], [EMPTY, EMPTY]):
        assert not accepts(grammar, tools.write(calls), control)


@pytest.mark.parametrize("tools", FORMATS)
def test_tool_choice_auto_allows_text_until_a_call_begins(
    tools: ToolFormat, control: Mapping[str, int]
) -> None:
    one, several = tools.write([COUNT]), tools.write([COUNT, EMPTY])
    for parallel in (True, False):
        grammar = tools.grammar(TOOLS, AUTO, parallel, control)
        for text in ("", "Hi.", "  Hi\n[1] {x} <tool_ [TOOL", one, tools.write([EMPTY])):
            assert accepts(grammar, text, control)
        assert accepts(grammar, several, control) == parallel
        assert not accepts(grammar, one[:-1], control)
        assert not accepts(grammar, one + "Hi", control)
        if tools in MARKED:
            assert accepts(grammar, f"Hi\n{one}", control)
            assert not accepts(grammar, f"Hi\n{one[:-1]}", control)


def test_formats_without_markers_forbid_text_that_begins_like_a_call() -> None:
    for tools in (LLAMA3, JSON):
        grammar = tools.grammar(TOOLS, AUTO, True)
        assert not accepts(grammar, '{"title": 1}') and not accepts(grammar, ' {"title": 1}')
        assert accepts(grammar, 'So: {"title": 1}') and accepts(grammar, "[x](y)")
    control = VOCABULARIES[True].control
    tagged = f"Hi <|python_tag|>{LLAMA3.write([EMPTY])}"
    assert accepts(LLAMA3.grammar(TOOLS, AUTO, True, control), tagged, control)
    assert not accepts(LLAMA3.grammar(TOOLS, AUTO, True, control), tagged[:-1], control)


def test_tool_choice_none_or_no_tools_gives_no_grammar() -> None:
    for tools in FORMATS:
        assert tools.grammar(TOOLS, ToolChoice("none"), True) is None
        assert tools.grammar([], AUTO, True) is None
        assert tools.grammar(TOOLS, ToolChoice("none"), True, answer="start: /x/") == "start: /x/"


ANSWERS = (
    '%llguidance {}\nstart: %json {"type": "object", "required": ["ok"]}\n',
    LLMatcher.grammar_from_json_schema({"type": "object", "required": ["ok"]}),
)


@pytest.mark.parametrize("answer", ANSWERS, ids=["lark", "json"])
def test_auto_with_a_response_format_allows_calls_or_the_format(
    answer: str, control: Mapping[str, int]
) -> None:
    for tools in MARKED:
        grammar = tools.grammar(TOOLS, AUTO, True, control, answer=answer)
        assert accepts(grammar, '{"ok": 1}', control)
        assert accepts(grammar, tools.write([COUNT, EMPTY][: 1 + (tools is HERMES)]), control)
        assert not accepts(grammar, "Hi", control) and not accepts(grammar, '{"no": 1}', control)
    grammar = LLAMA3.grammar(TOOLS, AUTO, True, control, answer=answer)
    assert accepts(grammar, '{"ok": 1}', control)
    assert accepts(grammar, f"<|python_tag|>{LLAMA3.write([EMPTY])}", control)
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        JSON.grammar(TOOLS, AUTO, True, control, answer=answer)


@pytest.mark.parametrize("answer", ANSWERS, ids=["lark", "json"])
def test_reasoning_may_precede_a_formatted_answer(answer: str, control: Mapping[str, int]) -> None:
    opened = with_reasoning(THINK, answer, True, control)
    assert accepts(opened, 'Hm {"ok":\n</think>\n\n{"ok": 1}', control)
    assert not accepts(opened, '{"ok": 1}', control)
    assert not accepts(opened, "Hm </think> Yes", control)
    optional = with_reasoning(THINK, answer, False, control)
    assert accepts(optional, '<think>Hm</think>\n\n{"ok": 1}', control)
    assert accepts(optional, '{"ok": 1}', control)
    assert not accepts(optional, 'Hm</think>{"ok": 1}', control)


@pytest.mark.parametrize("tools", FORMATS)
def test_reasoning_may_precede_calls_and_may_mention_markers(
    tools: ToolFormat, control: Mapping[str, int]
) -> None:
    """A marker inside the reasoning begins no call; behind it, it does."""
    output = OutputFormat(tools, OutputFormat.of("<think>", {}).reasoning, control)
    call = tools.write([EMPTY])
    mention = "" if control else tools.row.trigger or "{"
    for opened in (True, False):
        thought = f"{'' if opened else '<think>'}Hm, {mention}\n</think>\n\n"
        auto = output.grammar(TOOLS, AUTO, True, None, opened)
        assert accepts(auto, thought + call, control)
        assert accepts(auto, thought + "Hi", control)
        assert not accepts(auto, thought + call[:-1], control)
        assert accepts(auto, call, control) is not opened
        required = output.grammar(TOOLS, REQUIRED, True, None, opened)
        assert accepts(required, thought + call, control)
        assert not accepts(required, thought + "Hi", control)


def test_only_strict_tools_enforce_every_schema_keyword() -> None:
    properties = {"a": {"not": {"pattern": "x"}}, "b": {"$ref": "#/$defs/b"}}
    parameters = {"type": "object", "properties": properties, "required": ["b"]}
    parameters["$defs"] = {"b": {"type": "integer"}}
    function = {"name": "f", "parameters": parameters}
    for strict in (None, False):
        tools = [{"type": "function", "function": {**function, "strict": strict}}]
        grammar = JSON.grammar(tools, REQUIRED, True)
        assert accepts(grammar, JSON.write([("f", '{"a": [], "b": 1}')]))
        for arguments in ('{"a": 1}', '{"b": "1"}', '{"b": 1, "c": 1}'):
            assert not accepts(grammar, JSON.write([("f", arguments)]))
    refusal = "tools.f.parameters.properties.a.not: keyword 'pattern'"
    with pytest.raises(InvalidRequestError, match=refusal):
        JSON.grammar([{"type": "function", "function": {**function, "strict": True}}], AUTO, True)


def test_only_a_strict_tool_refuses_what_no_grammar_enforces() -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": tags}}}
    grammar = JSON.grammar([{"type": "function", "function": function}], REQUIRED, True)
    assert accepts(grammar, JSON.write([("f", '{"a": ["x"]}')]))
    assert not accepts(grammar, JSON.write([("f", '{"a": [1]}')]))
    with pytest.raises(
        InvalidRequestError, match=r"tools\.f\.parameters\.properties\.a\.uniqueItems"
    ):
        JSON.grammar([{"type": "function", "function": {**function, "strict": True}}], AUTO, True)


@pytest.mark.parametrize(
    "parameters",
    [{"properties": 5}, {"$ref": "#/nowhere"}, {"allOf": [{"not": {}}]}, {"$schema": "odd:"}],
)
def test_arguments_are_an_object_whatever_the_parameter_schema_says(
    parameters: dict[str, Any],
) -> None:
    function = {"name": "f", "parameters": parameters}
    grammar = JSON.grammar([{"type": "function", "function": function}], REQUIRED, True)
    assert accepts(grammar, JSON.write([("f", "{}")]))
    assert not accepts(grammar, JSON.write([("f", "1")]))


@pytest.mark.parametrize("tools", FORMATS)
def test_without_a_vocabulary_markers_are_matched_as_text(tools: ToolFormat) -> None:
    output = OutputFormat(tools, OutputFormat.of("<think>", {}).reasoning, {"[TOOL_CALLS]": 49_000})
    for choice in (AUTO, REQUIRED, NAMED):
        grammar = output.by_text().grammar(TOOLS, choice, True, None, opened=False)
        assert problem_of(grammar or "", byte_tokenizer()) is None


def test_a_grammar_of_128_tools_compiles() -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool-{index}", "parameters": PARAMETERS}}
        for index in range(128)
    ]
    for family in (HERMES, MISTRAL_ARGS):
        grammar = family.grammar(tools, AUTO, True)
        assert accepts(grammar, family.write([("tool-127", '{"count": 1}')]))


def walk(grammar: str, vocabulary: Vocabulary, rng: random.Random) -> str:
    """A random text that the grammar lets through."""
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
    mask = allocate_token_bitmask(1, len(vocabulary.tokens))
    out = b""
    for _ in range(3000):
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed: Sequence[int] = np.flatnonzero(bits).tolist()
        token = EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(allowed)
        if token == EOS:
            return out.decode()
        assert matcher.consume_token(token), matcher.get_error()
        out += vocabulary.tokens[token]
    raise AssertionError(f"no end: {out[-80:]!r}")


@pytest.mark.parametrize("tools", FORMATS)
def test_random_outputs_of_forced_grammars_parse_as_valid_calls(
    tools: ToolFormat, control: Mapping[str, int]
) -> None:
    schemas = {"get_weather": PARAMETERS, "get": NOTHING}
    grammar = tools.grammar(TOOLS, REQUIRED, True, control)
    assert grammar is not None
    for seed in range(6):
        text = walk(grammar, VOCABULARIES[bool(control)], random.Random(seed))
        parser = OutputParser(tools, frozenset(schemas))
        pieces = [*parser.push(text), *parser.flush()]
        calls = [piece for piece in pieces if isinstance(piece, ToolCallPiece)]
        assert calls == pieces and calls, f"{text!r} has more than calls"
        for first in [piece for piece in calls if piece.name is not None]:
            arguments = "".join(p.arguments for p in calls if p.index == first.index)
            jsonschema.validate(json.loads(arguments), schemas[str(first.name)])


def test_tool_choice_of_an_unknown_tool_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="missing") as refused:
        HERMES.grammar(TOOLS, ToolChoice("named", "missing"), True)
    assert refused.value.param == "tool_choice"


def test_compiling_tool_schemas_takes_linear_time(monkeypatch) -> None:
    tried = 0

    def compile_counted(schema: Any, where: str) -> dict[str, Any]:
        nonlocal tried
        tried += len(json.dumps(schema))
        return compile_schema(schema, where)

    monkeypatch.setattr(grammars, "compile_schema", compile_counted)
    parameters = {
        "properties": {
            "odd": {"type": "string", "pattern": "(?<=a)b"},
            **{f"p{index}": {"$ref": f"#/$defs/d{index}"} for index in range(400)},
        },
        "$defs": {f"d{index}": {"type": "string"} for index in range(400)},
    }
    rule = arguments_rule({"function": {"name": "f", "parameters": parameters}})
    assert '"p399"' in rule
    assert tried < 8 * len(json.dumps(parameters))
