"""Faults in the events of a stream, one each. Each takes the events and returns those to send."""

import json
from typing import Any


def repeat_role(found: list[Any]) -> list[Any]:
    for event in found[:-1]:
        if event["choices"]:
            event["choices"][0]["delta"]["role"] = "assistant"
    return found


def merge_usage(found: list[Any]) -> list[Any]:
    """Usage in the chunk of the finish_reason, as some servers do."""
    *rest, finish, usage, done = found
    if usage["choices"]:
        return found
    return [*rest, finish | {"usage": usage["usage"]}, done]


def early_finish(found: list[Any]) -> list[Any]:
    found[0]["choices"][0]["finish_reason"] = "stop"
    return found


def new_id_each(found: list[Any]) -> list[Any]:
    return [e if isinstance(e, str) else e | {"id": f"id-{n}"} for n, e in enumerate(found)]


def mixed_up(found: list[Any]) -> list[Any]:
    return [e if isinstance(e, str) else e | {"id": "the-same-for-all"} for e in found]


def torn_emoji(found: list[Any]) -> list[Any]:
    for event in found[:-1]:
        delta = event["choices"][0]["delta"]
        if not (delta.get("content") or "").isascii():
            delta["content"] = "\N{REPLACEMENT CHARACTER}"
    return found


def half_pairs(found: list[Any]) -> list[Any]:
    for event in found[:-1]:
        delta = event["choices"][0]["delta"]
        if not (delta.get("content") or "").isascii():
            delta["content"] = "\ud83d"
    return found


def last_word_in_finish(found: list[Any]) -> list[Any]:
    found[-2]["choices"][0]["delta"]["content"] = "."
    return found


def no_finish(found: list[Any]) -> list[Any]:
    for event in found[:-1]:
        if event["choices"]:
            event["choices"][0]["finish_reason"] = None
    return found


def all_name_pieces(found: list[Any]) -> list[Any]:
    for event in found[:-1]:
        for call in event["choices"][0]["delta"].get("tool_calls", []):
            call["id"] = "call_1"
            call["function"]["name"] = "get_weather"
    return found


def unnamed(found: list[Any]) -> list[Any]:
    return [json.dumps(each) for each in found]
