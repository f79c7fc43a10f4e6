"""Assertions about a server's answers, which the rules use.

A rule is skipped, with the reason, if it can't be judged: the server refuses an optional feature by
name, or the model's answer lacks what the rule needs. A skipped rule does not count as passed.
"""

from collections.abc import Mapping
from typing import Any

# HTTP statuses with which a server reports a client error. SDKs do not retry these.
REFUSALS = frozenset({400, 413, 415, 422})


class RuleFailed(Exception):
    """The server violated the rule. The message says how."""

    def __init__(self, message: str, *, is_advice: bool = False) -> None:
        super().__init__(message)
        self.is_advice = is_advice


class RuleSkipped(Exception):
    """The rule can't be judged on this server. The message says why."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise RuleFailed(message)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def field(value: Any, *path: str | int) -> Any:
    """The value at `path` in parsed JSON. Fails the rule if it is missing."""
    for position, key in enumerate(path):
        is_there = (isinstance(key, str) and isinstance(value, Mapping) and key in value) or (
            isinstance(key, int) and isinstance(value, list) and -len(value) <= key < len(value)
        )
        if not is_there:
            raise RuleFailed(f"no {'.'.join(map(str, path[: position + 1]))} in the answer")
        value = value[key]
    return value


def text(value: Any, *path: str | int) -> str:
    """The string at `path` in parsed JSON. Fails the rule if there is none."""
    found = field(value, *path)
    if not isinstance(found, str):
        raise RuleFailed(f"{'.'.join(map(str, path))} is {short(found)}, not a string")
    return found


def items(value: Any, *path: str | int) -> list[Any]:
    """The list at `path` in parsed JSON. Fails the rule if there is none or if it is empty."""
    found = field(value, *path)
    if not isinstance(found, list) or not found:
        raise RuleFailed(f"{'.'.join(map(str, path))} is {short(found)}, not a list with entries")
    return found


def short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
