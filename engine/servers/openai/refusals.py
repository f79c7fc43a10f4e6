"""Parameters that clients send and this server can't act on: refused by name, never ignored.

A value that asks for nothing (`functions: []`, `store: false`, null) is the same as leaving the
parameter out, and SDKs send such values all the time, so those are dropped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from engine.core.errors import InvalidRequestError

# Parameter -> the values, besides null, that mean "not wanted". Endpoints that know a parameter
# never look here; `best_of` is one for completions, and nothing for chats.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of no tools
    "prediction": (),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # among no tools
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
# What to send instead, where there is something.
_INSTEAD = {"functions": "send tools", "function_call": "send tool_choice"}

_MAX_NAMED = 10


def drop_no_effect(
    body: dict[str, Any],
    known: Iterable[str],
    no_effect: Mapping[str, tuple[Any, ...]] = NO_EFFECT,
) -> dict[str, Any]:
    """`body` with only the `known` parameters; raises `InvalidRequestError` for what is left."""
    known = frozenset(known)
    unknown: list[str] = []
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name not in no_effect:
            unknown.append(name)
        elif not asks_for_nothing(value, no_effect[name]):
            raise InvalidRequestError(
                f"{name} is not supported by this endpoint; {_INSTEAD.get(name, 'leave it out')}.",
                param=name,
                code="unsupported_parameter",
            )
    if unknown:
        names = ", ".join(name[:64] for name in unknown[:_MAX_NAMED])
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        raise InvalidRequestError(
            f"Unknown parameter: {names}{more}.",
            param=unknown[0][:64],
            code="unknown_parameter",
        )
    return kept


@dataclass(frozen=True, slots=True)
class OffValues:
    """Of a field that a body has only to refuse it in its own words; see `off_values`."""

    values: tuple[Any, ...]


def off_values(kind: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """The fields of `kind` that are refused, with what is taken of them besides null."""
    return {
        name: each.values
        for name, field in kind.model_fields.items()
        for each in field.metadata
        if isinstance(each, OffValues)
    }


def asks_for_nothing(value: Any, off_values: Iterable[Any]) -> bool:
    """Whether `value` is null or one of `off_values`."""
    # `1 == True` in Python, but not in JSON.
    return value is None or any(type(value) is type(each) and value == each for each in off_values)
