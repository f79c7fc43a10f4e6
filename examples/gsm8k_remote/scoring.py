"""What an answer comes to: the number after ####, or else the last number that it has."""

import re
from decimal import Decimal, InvalidOperation

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")


def marked_number(text: str) -> Decimal | None:
    """Where the answer keeps to the form that was asked for."""
    found = _MARKED.findall(text)
    return _decimal(found[-1]) if found else None


def last_number(text: str) -> Decimal | None:
    found = re.findall(_NUMBER, text)
    return _decimal(found[-1]) if found else None


def predicted_number(text: str) -> Decimal | None:
    marked = marked_number(text)
    return marked if marked is not None else last_number(text)


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
