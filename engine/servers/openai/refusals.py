"""Parameters that clients send and this server can't act on: refused by name, never ignored.

A value that asks for nothing (`tools: []`, `best_of: 1`, null) is the same as leaving the parameter
out, and SDKs send such values all the time, so those are dropped.
"""

from collections.abc import Iterable
from typing import Any

from engine.core.errors import InvalidRequestError

# Parameter -> the values, besides null, that mean "not wanted".
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # of no tools
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # among no tools
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

_MAX_NAMED = 10


def drop_no_effect(body: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """`body` with only the `known` parameters; raises `InvalidRequestError` for what is left."""
    known = frozenset(known)
    unknown: list[str] = []
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name not in NO_EFFECT:
            unknown.append(name)
        elif not _has_no_effect(name, value):
            raise InvalidRequestError(
                f"{name} is not supported by this server; leave it out.",
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


def _has_no_effect(name: str, value: Any) -> bool:
    if value is None:
        return True
    # `1 == True` in Python, but not in JSON.
    return any(type(value) is type(each) and value == each for each in NO_EFFECT[name])
