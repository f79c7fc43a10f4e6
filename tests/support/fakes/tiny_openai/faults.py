"""Ways to break the tiny server's answers on their way out."""

import copy
import json
from collections.abc import Callable
from typing import Any

from tests.support.fakes.tiny_openai.app import Fault, Outgoing

GONE = object()
CHAT = "/v1/chat/completions"
Condition = Callable[[Outgoing], bool]


def put(path: str, value: Any, on: str = "", when: Condition = lambda outgoing: True) -> Fault:
    """Another value at a dotted path of every JSON body and chunk that has it; `GONE` removes it.

    A star stands for every entry of a list.
    """

    def fault(outgoing: Outgoing) -> None:
        if not outgoing.path.startswith(on) or not when(outgoing):
            return
        if outgoing.events is not None:
            outgoing.events = copy.deepcopy(outgoing.events)
            for event in outgoing.events:
                _put(event, path.split("."), value)
        else:
            outgoing.body = copy.deepcopy(outgoing.body)
            _put(outgoing.body, path.split("."), value)

    return fault


def _put(body: Any, path: list[str], value: Any) -> None:
    key, rest = path[0], path[1:]
    if isinstance(body, list):
        for each in body if key == "*" else body[int(key) : int(key) + 1 or None]:
            _put(each, rest, value)
    elif isinstance(body, dict) and key in body:
        if rest:
            _put(body[key], rest, value)
        elif value is GONE:
            del body[key]
        else:
            body[key] = value(body[key]) if callable(value) else value


def events(edit: Callable[[list[Any]], list[Any]], on: str = CHAT) -> Fault:
    """Other events in every stream of `on`."""

    def fault(outgoing: Outgoing) -> None:
        if outgoing.path == on and outgoing.events is not None:
            outgoing.events = edit(copy.deepcopy(outgoing.events))

    return fault


def header(name: str, value: str | None) -> Fault:
    def fault(outgoing: Outgoing) -> None:
        outgoing.headers.pop(name, None)
        if value is not None:
            outgoing.headers[name] = value

    return fault


def status(code: int, when: Condition) -> Fault:
    """An error with this status where `when` holds; it names no parameter."""

    def fault(outgoing: Outgoing) -> None:
        if when(outgoing):
            outgoing.status, outgoing.events = code, None
            outgoing.headers["content-type"] = "application/json"
            error = {"message": "broken on purpose", "type": "x", "param": None, "code": None}
            outgoing.body = {"error": error}

    return fault


def asks(name: str, value: Any = GONE, on: str = "") -> Condition:
    """Whether a request has a parameter, or has it with this value."""

    def condition(outgoing: Outgoing) -> bool:
        found = outgoing.request.get(name, GONE)
        is_asked = found is not GONE if value is GONE else found == value
        return is_asked and outgoing.path.startswith(on)

    return condition


def says(text: str, on: str = "") -> Condition:
    """Whether a request has this text anywhere."""
    return lambda outgoing: text in json.dumps(outgoing.request) and outgoing.path.startswith(on)


def answers(path: str, body: Any, when: Condition = lambda outgoing: True) -> Fault:
    """A success with this body instead of whatever it was."""

    def fault(outgoing: Outgoing) -> None:
        if outgoing.path.startswith(path) and when(outgoing):
            outgoing.status, outgoing.events, outgoing.body = 200, None, copy.deepcopy(body)
            outgoing.headers["content-type"] = "application/json"

    return fault
