"""Operations of chat templates whose result can grow. They check sizes first."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from engine.core.errors import InvalidRequestError

_MAX_STRING_CHARS = 1 << 23
_MAX_WEIGHT = 200_000  # max values in one list or mapping, including nested values
_MAX_RANGE = 100_000
_MAX_INT_BITS = 4096
_PLAIN_DATE = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,64}")


class LimitExceeded(InvalidRequestError):
    """A template used more time, text or structure than rendering a prompt can need."""


def check_length(length: int) -> None:
    if length > _MAX_STRING_CHARS:
        raise LimitExceeded(
            f"The chat template built a string over {_MAX_STRING_CHARS} characters."
        )


def weight(value: Any) -> int:
    """The cost of comparing or printing `value`: one for each nested value, plus one per 64
    characters of text. Raises `LimitExceeded` if the cost is too high.
    """
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item) >> 6
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        total += 1
        if total + len(pending) > _MAX_WEIGHT:
            raise LimitExceeded("The chat template built a list or mapping that is too large.")
    return total


def checked(value: Any) -> Any:
    if isinstance(value, str):
        check_length(len(value))
    elif isinstance(value, (list, tuple, dict)):
        weight(value)
    return value


def join(separator: str, parts: Sequence[str]) -> str:
    check_length(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def replace(text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old) if count < 0 else min(count, text.count(old))
    check_length(len(text) + found * len(new))
    return text.replace(old, new, count)


def add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        check_length(len(left) + len(right))
        return left + right
    return checked(left + right)


def multiply(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise LimitExceeded("The chat template multiplies numbers that are too large.")
        return left * right
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int) and times > 0:
            check_length(len(sequence) * times)
            if not isinstance(sequence, str) and weight(sequence) * times > _MAX_WEIGHT:
                raise LimitExceeded("The chat template builds a list that is too large.")
    return left * right


def power(left: Any, right: Any) -> Any:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * abs(right) > _MAX_INT_BITS
    ):
        raise LimitExceeded("The chat template computes a number that is too large.")
    return left**right


def modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise LimitExceeded("The chat template formats with '%', which templates cannot use here.")
    return left % right


def bounded_range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > _MAX_RANGE:
        raise LimitExceeded(f"The chat template asks for a range of over {_MAX_RANGE} numbers.")
    return values


def center(text: str, width: int = 80) -> str:
    check_length(width)
    return text.center(width)


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = width if isinstance(width, str) else multiply(" ", width)
    check_length(len(text) + (text.count("\n") + 1) * len(step))
    head, *rest = (text + "\n").splitlines() or [""]
    lines = [step + head if first else head]
    lines += [step + line if line or blank else line for line in rest]
    return "\n".join(lines)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise LimitExceeded("The chat template indents JSON by more than 16 spaces.")
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, _MAX_WEIGHT))
    weight(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class OwnList(list[Any]):
    """A list that the template has made. Only these lists may grow."""


def append(values: OwnList, value: Any) -> None:
    values.append(value)
    weight(values)


def strftime_now(layout: str) -> str:
    if not _PLAIN_DATE.fullmatch(layout):
        raise LimitExceeded("The chat template uses a date layout that templates cannot use here.")
    return datetime.now().strftime(layout)
