"""The words that rules are written in: what they expect, and how they give up.

A rule that cannot tell (the server refuses an optional feature by name, or the model did not write
what was needed) is skipped with its reason; it never passes by default.
"""

from collections.abc import Mapping
from typing import Any

# A client's mistake, said in a way that no SDK sends again.
REFUSALS = frozenset({400, 413, 415, 422})


class RuleFailed(Exception):
    """The server broke the rule; the message is what it did."""

    def __init__(self, message: str, *, is_advice: bool = False) -> None:
        super().__init__(message)
        self.is_advice = is_advice


class RuleSkipped(Exception):
    """The rule can't be judged here; the message says why."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise RuleFailed(message)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def field(value: Any, *path: str | int) -> Any:
    """What is at `path` in parsed JSON; fails the rule where it is missing."""
    for position, key in enumerate(path):
        is_there = (isinstance(key, str) and isinstance(value, Mapping) and key in value) or (
            isinstance(key, int) and isinstance(value, list) and -len(value) <= key < len(value)
        )
        if not is_there:
            raise RuleFailed(f"no {'.'.join(map(str, path[: position + 1]))} in the answer")
        value = value[key]
    return value


def text(value: Any, *path: str | int) -> str:
    """The string at `path`."""
    found = field(value, *path)
    if not isinstance(found, str):
        raise RuleFailed(f"{'.'.join(map(str, path))} is {short(found)}, not a string")
    return found


def items(value: Any, *path: str | int) -> list[Any]:
    """The list at `path`, which must have entries."""
    found = field(value, *path)
    if not isinstance(found, list) or not found:
        raise RuleFailed(f"{'.'.join(map(str, path))} is {short(found)}, not a list with entries")
    return found


def short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
