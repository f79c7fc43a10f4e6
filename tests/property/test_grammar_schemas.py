"""Whatever a schema's grammar allows is valid under the schema, as judged by another library.

Random walks stand in for a model. Each samples tokens that the mask allows, and prefers to finish
after a while. A finished walk must be JSON that validates, including formats; no walk may get
stuck. Every schema of the official suite and of real tools is either walked with the default
model's vocabulary, or refused with an error that names the unsupported keyword or rule.
"""

import asyncio
import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema.validators import Draft202012Validator, validator_for
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.core.errors import InvalidRequestError
from engine.core.grammar.child import byte_tokenizer, problem_of
from engine.core.grammar.limits import parser_limits
from engine.core.grammar.schema_rules import unchecked_keywords
from engine.core.grammar.spec import grammar_text
from engine.core.interfaces.backend import GrammarSpec
from engine.frontend.text_model import load_text
from tests.property import schema_counts
from tests.support.files.schema_suites import (
    NamedSchema,
    real_schemas,
    suite_schemas,
    supported_among,
    supported_schemas,
)

NUM_FREE_TOKENS = 25
MAX_TOKENS = 300
CLOSERS = (b"]", b"}", b'"')
# A refusal names the schema's path, then the keyword or what is wrong with it.
REFUSAL = re.compile(
    r"schema(\.[^:]*)*: (keyword '|'|format \"|the pattern |no finite JSON value |a '\$ref' |"
    r"the conditions on |numbers are only |it admits no value |it is \d+ bytes long)"
)
# Small, so that walks often spell declared names, enumerated values and bounds.
ALPHABET = [char.encode() for char in 'ab{}[]":,0123459.-truefalsnl é']
NAMES = ["a", "b", "ab", "ba"]
PATTERNS = [
    *("^a", "b$", "^a$", "^[ab]b", "a", "^[^a]", r"^\w$", r"^\W*$", "^(a|ba?)+$", r"\d$"),
    *(r"^\D\S?$", "^.{1,3}$", r"^[^\W\d]+$"),
]
NAME_RULES = [
    *(
        {"enum": ["a", "b", "l"]},
        {"const": "ab"},
        {"maxLength": 2},
        {"minLength": 2, "maxLength": 3},
    ),
    {"$ref": "#/$defs/x"},
    {"not": {"enum": ["a", "ba"]}},
]
FEW_ITEMS = [
    {"type": "boolean"},
    {"enum": ["a", 1, 1.0, None]},
    {"type": "integer", "minimum": 0, "maximum": 3},
]


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer interface of llguidance, and the tokens for the walks."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: None = None

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


class Walker:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
        self._lengths = np.array([len(token) for token in vocabulary.tokens])
        self._closers = [vocabulary.tokens.index(closer) for closer in CLOSERS]

    def walk(self, grammar: str, rng: random.Random) -> str | None:
        """The text of one walk; None if it did not end in time."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        assert not matcher.is_error(), matcher.get_error()
        text = b""
        # Some walks use short tokens only: most long ones are words, and occur only inside strings.
        max_bytes = rng.choice([1, 3, 100])
        for index in range(MAX_TOKENS):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: len(self._lengths)].astype(bool)
            assert allowed.any(), f"stuck after {text!r}: {matcher.get_error()}"
            token = self._choose(allowed, index >= NUM_FREE_TOKENS, max_bytes, rng)
            if token == self._vocabulary.eos_token_id:
                return text.decode()
            assert matcher.consume_token(token)
            text += self._vocabulary.tokens[token]
        return None

    def _choose(
        self, allowed: np.ndarray, hurried: bool, max_bytes: int, rng: random.Random
    ) -> int:
        end = self._vocabulary.eos_token_id
        if allowed[end] and (hurried or rng.random() < 0.3):
            return end
        allowed[end] = False
        if hurried and rng.random() < 0.8:
            closing = [token for token in self._closers if allowed[token]]
            if closing:
                return rng.choice(closing)
        few = np.flatnonzero(allowed & (self._lengths <= (1 if hurried else max_bytes)))
        if not len(few):
            few = np.flatnonzero(allowed)
        return int(rng.choice(few)) if len(few) else end


@pytest.fixture(scope="module")
def walker(default_model: Path) -> Walker:
    tokenizer = load_text(default_model).tokenizer
    tokens = [
        b"\xff" + tokenizer.token_literal(i)
        if tokenizer.is_special(i)
        else tokenizer.token_bytes(i)
        for i in range(tokenizer.vocab_size)
    ]
    specials = sorted(tokenizer.special_ids)
    return Walker(Vocabulary(tokens, specials, tokenizer.eos_ids[0], tokenizer.encode))


def grammar_of(schema: Any) -> str:
    return grammar_text(GrammarSpec(kind="json_schema", source=json.dumps(schema), param="schema"))


def check_valid(schema: Any, text: str) -> None:
    kind = validator_for(schema, default=Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def walk_all(walker: Walker, schemas: list[NamedSchema], num_walks: int) -> int:
    """The number of walks that ended; each of them is validated."""
    num_ended = 0
    for name, schema in schemas:
        grammar = grammar_of(schema)
        for number in range(num_walks):
            text = walker.walk(grammar, random.Random(f"{name} {number}"))
            if text is None:
                continue
            num_ended += 1
            try:
                check_valid(schema, text)
            except Exception as error:
                raise AssertionError(f"{name}: {text} under {json.dumps(schema)[:500]}") from error
    return num_ended


def check_refusals(schemas: list[NamedSchema]) -> None:
    """Check that schemas which are refused before compiling are refused by name."""
    for name, schema in schemas:
        try:
            grammar_of(schema)
        except InvalidRequestError as error:
            assert error.param == "schema"
            assert REFUSAL.match(error.message), f"{name}: {error}"


@pytest.mark.seconds
def test_random_outputs_of_real_schema_grammars_validate(walker: Walker) -> None:
    schemas = real_schemas()
    check_refusals(schemas)
    supported = asyncio.run(supported_among(schemas[::4]))
    assert len(supported) > 200
    assert walk_all(walker, supported, num_walks=2) > 400


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_outputs_of_the_json_schema_suite_grammars_validate(walker: Walker) -> None:
    check_refusals(suite_schemas())
    supported = supported_schemas()
    assert len(supported) > 1400
    assert walk_all(walker, supported, num_walks=5) > 7000


@pytest.mark.slow
def test_no_invalid_instance_of_the_json_schema_suite_is_accepted() -> None:
    assert schema_counts.main() == 0


class RandomSchemas:
    """Generates small schemas in which every keyword meets every other one."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def document(self) -> dict[str, Any]:
        definitions = {name: self.node(2) for name in "xyz"}
        root = self.node(3)
        return {**(root if isinstance(root, dict) else {}), "$defs": definitions}

    def node(self, depth: int) -> Any:
        pick = self._rng.random()
        if depth <= 0 or pick < 0.35:
            return self._leaf()
        if pick < 0.65:
            return self._object(depth)
        if pick < 0.77:
            return self._array(depth)
        siblings = self._object(depth - 1) if self._rng.random() < 0.5 else {}
        rule = self._conditions if pick < 0.88 else self._combination
        return {**rule(depth), **siblings}

    def _maybe(self, chance: float, **keywords: Any) -> dict[str, Any]:
        return keywords if self._rng.random() < chance else {}

    def _combination(self, depth: int) -> dict[str, Any]:
        keyword = self._rng.choice(["allOf", "anyOf", "oneOf", "$ref"])
        if keyword == "$ref":
            return {"$ref": f"#/$defs/{self._rng.choice('xyz')}"}
        return {keyword: [self.node(depth - 1) for _ in range(self._rng.randint(1, 3))]}

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names, patterns = rng.sample(NAMES, rng.randint(0, 3)), rng.sample(PATTERNS, 1)
        keywords = {
            **self._maybe(0.8, type="object"),
            **self._maybe(0.7, properties={name: self.node(depth - 1) for name in names}),
            **self._maybe(0.3, patternProperties={p: self.node(depth - 1) for p in patterns}),
            **self._maybe(0.5, additionalProperties=rng.choice([False, self.node(depth - 1)])),
            **self._maybe(0.4, required=rng.sample(NAMES, rng.randint(0, 2))),
            **self._maybe(0.1, minProperties=rng.randint(0, 2)),
            **self._maybe(0.1, maxProperties=rng.randint(0, 3)),
        }
        return dict(rng.sample(sorted(keywords.items(), key=lambda item: item[0]), len(keywords)))

    def _conditions(self, depth: int) -> dict[str, Any]:
        """Conditions on the value as a whole, and on the properties of an object."""
        rng = self._rng
        part = functools.partial(self.node, depth - 1)
        return rng.choice(
            [
                {"not": part()},
                {
                    "if": part(),
                    **self._maybe(0.8, then=part()),
                    **self._maybe(0.7, **{"else": part()}),
                },
                {"dependentRequired": {"a": ["b"], **self._maybe(0.3, ab=["ba", "a"])}},
                {"dependentSchemas": {"a": part(), **self._maybe(0.3, b=part())}},
                {"propertyNames": rng.choice([*NAME_RULES, {"pattern": rng.choice(PATTERNS)}])},
                {"unevaluatedProperties": rng.choice([False, part()])},
                {"allOf": [self._comparison(depth) for _ in range(rng.randint(2, 3))]},
            ]
        )

    def _comparison(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        compared = rng.choice([{"const": rng.choice("ab")}, {"enum": ["a", "ab"]}])
        condition = {
            "properties": {"b": compared},
            **self._maybe(0.5, required=["b"]),
            **self._maybe(0.5, type="object"),
        }
        then, otherwise = self.node(depth - 2), self.node(depth - 2)
        return {"if": condition, "then": then, **self._maybe(0.5, **{"else": otherwise})}

    def _item_conditions(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        contained = {
            "contains": self.node(depth - 1),
            **self._maybe(0.4, minContains=rng.randint(0, 3)),
            **self._maybe(0.4, maxContains=rng.randint(0, 3)),
        }
        few = {"uniqueItems": True, "items": rng.choice(FEW_ITEMS)}
        return rng.choice(
            [contained, few, {"unevaluatedItems": rng.choice([False, self.node(depth - 1)])}]
        )

    def _array(self, depth: int) -> dict[str, Any]:
        return {
            **self._maybe(0.7, type="array"),
            **self._maybe(0.5, prefixItems=[self.node(depth - 1)]),
            **self._maybe(0.6, items=self.node(depth - 1)),
            **self._maybe(0.4, minItems=self._rng.randint(0, 3)),
            **self._maybe(0.4, maxItems=self._rng.randint(0, 4)),
            **(self._item_conditions(depth) if self._rng.random() < 0.4 else {}),
        }

    def _leaf(self) -> Any:
        rng = self._rng
        values = ["a", "b", "ab", 1, 0, 1.0, 2.5, True, None, {"b": "a"}, [1, "a"]]
        bounds = [0, 1, -1, 0.5, 2.25, 10, -3, 100, 0.1, 33, 0.30000000000000004]
        number = {
            **self._maybe(0.8, type=rng.choice(["integer", "number"])),
            **self._maybe(0.3, minimum=rng.choice(bounds)),
            **self._maybe(0.3, maximum=rng.choice(bounds)),
            **self._maybe(0.3, exclusiveMinimum=rng.choice(bounds)),
            **self._maybe(0.3, exclusiveMaximum=rng.choice(bounds)),
            **self._maybe(0.2, multipleOf=rng.choice([1, 2, 3, 5])),
        }
        string = {
            **self._maybe(0.8, type="string"),
            **self._maybe(0.5, pattern=rng.choice(PATTERNS)),
            **self._maybe(0.3, minLength=rng.randint(0, 3)),
            **self._maybe(0.3, maxLength=rng.randint(0, 4)),
        }
        others = [{"const": rng.choice(values)}, {"enum": rng.sample(values, 3)}, True, False]
        types = rng.sample(["string", "integer", "null", "object", "array", "number"], 2)
        return rng.choice([number, string, *others, {"type": types}])


@pytest.mark.seconds
def test_random_outputs_of_random_schema_grammars_validate() -> None:
    def encode(text: str) -> list[int]:
        return [ALPHABET.index(char.encode()) for char in text]

    end = len(ALPHABET)
    walker = Walker(Vocabulary([*ALPHABET, b"\xff<end>"], [end], end, encode))
    num_walked = 0
    for seed in range(1000):
        schema = RandomSchemas(seed).document()
        try:
            grammar = grammar_of(schema)
        except InvalidRequestError as error:
            assert REFUSAL.match(error.message), error
            continue
        is_whole = not unchecked_keywords(schema, "schema")
        if is_whole and problem_of(grammar, byte_tokenizer()) is None:
            num_walked += 1
            walk_all(walker, [(str(seed), schema)], num_walks=4)
    assert num_walked > 400
