"""Converts the output constraint of a request (JSON schema, regular expression, choices or grammar)
to an llguidance grammar.

The conversion takes linear time. It does not compile the grammar: `GrammarChecker` does that in a
child process with limits. llguidance is only imported when a request has a constraint.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from engine.core.errors import InvalidRequestError
from engine.core.grammar.gbnf import GbnfError, gbnf_to_lark, is_gbnf
from engine.core.grammar.regex_dialect import RegexError, literal, translate
from engine.core.grammar.schema_rules import compile_schema, unchecked_keywords
from engine.core.interfaces.backend import GrammarSpec

MAX_SOURCE_BYTES = 64 * 1024
UNCHECKED = ("uniqueItems",)  # the keywords that some grammars don't enforce


def grammar_text(spec: GrammarSpec) -> str:
    """Convert `spec` to a grammar for llguidance. The only error that it raises is
    `InvalidRequestError`, with the spec's `param`.
    """
    try:
        size = len(spec.source.encode())
    except UnicodeEncodeError:
        _fail(spec, "the text holds half of a surrogate pair, which is not Unicode")
    if size > MAX_SOURCE_BYTES:
        _fail(spec, f"it is {size} bytes long; at most {MAX_SOURCE_BYTES} are taken")
    return _BUILDERS[spec.kind](spec)


def unchecked_places(spec: GrammarSpec) -> list[str]:
    """The keywords of a schema that its grammar does not enforce, with their places. Empty for a
    schema that is refused anyway.
    """
    if spec.kind != "json_schema" or len(spec.source) > MAX_SOURCE_BYTES:
        return []
    try:
        return unchecked_keywords(_json(spec), spec.param)
    except InvalidRequestError:
        return []


def _fail(spec: GrammarSpec, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{spec.param}: {problem}.", param=spec.param)


def _json_object(spec: GrammarSpec) -> str:
    return _from_schema({"type": "object"}, spec)


def _json_schema(spec: GrammarSpec) -> str:
    return _from_schema(_json(spec), spec)


def _from_schema(schema: object, spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(compile_schema(schema, spec.param)))


def _regex(spec: GrammarSpec) -> str:
    try:
        return _from_regex(translate(spec.source, in_json=False))
    except RegexError as error:
        _fail(spec, f"the regular expression cannot be used: {error}")


def stop_grammar(pattern: str) -> str:
    """A grammar of the texts that end with a match of a regular expression."""
    spec = GrammarSpec(kind="regex", source=pattern, param="stop_regex")
    try:
        expression = translate(pattern, in_json=False)
    except RegexError as error:
        _fail(spec, f"the regular expression cannot be used: {error}")
    # After this replacement, each "^" is an anchor, because literal characters are escaped.
    if set("^$") & set(expression.replace("[^", "[")):
        _fail(spec, "the anchors ^ and $ are not supported, because the answer has no end yet")
    return _from_regex(f"(?s:.*)(?:{expression})")


def _choice(spec: GrammarSpec) -> str:
    choices = _json(spec)
    if not isinstance(choices, list) or not choices:
        _fail(spec, "it must be a list of strings that is not empty")
    if not all(isinstance(choice, str) for choice in choices):
        _fail(spec, "every choice must be a string")
    return _from_regex("|".join("".join(map(literal, choice)) for choice in choices))


def _from_regex(expression: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(expression)


def _grammar(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    if not is_gbnf(spec.source):
        return LLMatcher.grammar_from_lark(spec.source)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(spec.source))
    except GbnfError as error:
        _fail(spec, f"the GBNF grammar cannot be used: {error}")


def _json(spec: GrammarSpec) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(spec.source, parse_constant=refuse)
    except RecursionError:
        _fail(spec, "the JSON is nested too deeply")
    except ValueError as error:
        _fail(spec, f"it is not JSON: {error}")


_BUILDERS: dict[str, Callable[[GrammarSpec], str]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
