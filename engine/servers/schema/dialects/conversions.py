"""Converts values of other servers' request parameters to parameters of this server.

Each function takes the value, the parameter's name for error messages, and the names of the
parameters that the endpoint supports. It returns the parameters to use instead. They may be other
servers' parameters too. An empty result means that the value has no effect.
"""

from collections.abc import Callable, Collection
from typing import Any

from engine.servers.http.errors import check_keys, describe, problem
from engine.servers.schema.fields import NO_LIMIT
from engine.servers.schema.structured import parse_constraint

Convert = Callable[[Any, str, Collection[str]], dict[str, Any]]

_REASONING = ("effort", "enabled", "exclude", "max_tokens", "summary")


def renamed(to: str) -> Convert:
    """The parameter `to` takes the same values."""
    return lambda value, where, known: {to: value}


def output_limit(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """Limits below 0 mean "no limit but the context"."""
    return {"max_tokens": NO_LIMIT if type(value) is int and value < 0 else value}


def grammar(kind: str) -> Convert:
    """An output constraint of one of the kinds that `structured_outputs` has. An empty text is
    none.
    """

    def convert(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
        return {} if value == "" else {"structured_outputs": parse_constraint(kind, value, where)}

    return convert


def ollama_format(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """Ollama's `format` is "json" or a JSON schema. An empty text means no format."""
    if value == "":
        return {}
    if value == "json":
        return {"structured_outputs": parse_constraint("json_object", True, where)}
    if not isinstance(value, dict):
        raise problem(where, f'should be "json" or a JSON schema, got {describe(value)}')
    return {"structured_outputs": parse_constraint("json", value, where)}


def num_logprobs(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """In conversations, logprobs are turned on separately from the number of alternatives."""
    if type(value) is int and value == 0:
        return {}
    return {"logprobs": True, "top_logprobs": value} if "messages" in known else {"logprobs": value}


def options(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """Ollama's sampling parameters are in an object of their own."""
    if not isinstance(value, dict):
        raise problem(where, f"should be an object, got {describe(value)}")
    return value


def think(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """Ollama's `think` is a switch or a level."""
    return {"reasoning_effort" if isinstance(value, str) else "enable_thinking": value}


def thinking(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """The switch of DeepSeek's and GLM's APIs: `{"type": "enabled"}`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "disabled"):
        raise problem(f"{where}.type", f"should be enabled or disabled, got {describe(kind)}")
    check_keys(value, ("type",), where)
    return {"enable_thinking": kind == "enabled"}


def reasoning(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """OpenRouter's object for everything about reasoning. OpenAI's object in `/v1/responses` has
    two of its keys.
    """
    if not isinstance(value, dict):
        raise problem(where, f"should be an object, got {describe(value)}")
    check_keys(value, _REASONING, where)
    given = {key: each for key, each in value.items() if each is not None}
    if "max_tokens" in given:
        raise problem(f"{where}.max_tokens", "is not supported; send effort")
    used: dict[str, Any] = {}
    if "effort" in given:
        used["reasoning_effort"] = given["effort"]
    if "enabled" in given:
        used["enable_thinking"] = given["enabled"]
    if "exclude" in given:
        used["include_reasoning"] = not boolean(given["exclude"], f"{where}.exclude")
    if "summary" in given:
        used["reasoning_summary"] = given["summary"]
    return used


def boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise problem(where, f"should be a boolean, got {describe(value)}")
    return value
