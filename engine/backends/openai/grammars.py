"""What an answer must match, in the words of each dialect."""

from typing import Any

import msgspec

from engine.backends.openai.dialects import GrammarForm, Grammars
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import GrammarSpec

# What has a meaning of its own in a regular expression, in any of the dialects' engines.
_SPECIAL = frozenset("\\.^$*+?{}[]|()-/")


def grammar_fields(spec: GrammarSpec, grammars: Grammars, server: str) -> dict[str, Any]:
    """The fields of a request. Raises for what the dialect can't hold an answer to."""
    form = grammars.get(spec.kind)
    if form is None:
        can = f"it can follow {', '.join(sorted(grammars))}" if grammars else "it can follow none"
        raise InvalidRequestError(
            f"{spec.param} can't be used here: the model's server ({server}) holds no answer of "
            f"this kind to a {spec.kind}; {can}.",
            param=spec.param,
            code="unsupported_parameter",
        )
    return _fields(spec, form)


def _fields(spec: GrammarSpec, form: GrammarForm) -> dict[str, Any]:
    if form == "response_format":
        return {"response_format": _response_format(spec)}
    if form == "structured_outputs":
        return {"structured_outputs": {spec.kind: _value(spec)}}
    if form == "json_schema":
        return {"json_schema": {"type": "object"} if spec.kind == "json_object" else _value(spec)}
    if form == "ebnf":
        return {"ebnf": spec.source}
    if form == "gbnf":
        return {"grammar": _gbnf_choice(spec) if spec.kind == "choice" else spec.source}
    regex = _regex_choice(spec) if spec.kind == "choice" else spec.source
    if form == "regex":
        return {"regex": regex}
    return {"response_format": {"type": "regex", "value": regex}}


def _value(spec: GrammarSpec) -> Any:
    return (
        msgspec.json.decode(spec.source) if spec.kind in ("json_schema", "choice") else spec.source
    )


def _response_format(spec: GrammarSpec) -> dict[str, Any]:
    if spec.kind == "json_object":
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": _value(spec), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _regex_choice(spec: GrammarSpec) -> str:
    choices = ["".join(f"\\{c}" if c in _SPECIAL else c for c in text) for text in _value(spec)]
    return f"({'|'.join(choices)})"


def _gbnf_choice(spec: GrammarSpec) -> str:
    """llama.cpp reads the escapes of JSON strings in its literals."""
    literals = [msgspec.json.encode(text).decode() for text in _value(spec)]
    return f"root ::= {' | '.join(literals)}"
