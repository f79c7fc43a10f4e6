"""Compares an answer's text with what was expected: equal, contained, or the same number."""

import re
import unicodedata
from decimal import Decimal, InvalidOperation

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_BEYOND_WORDS = re.compile(r"[^\w\s]")


def normalized(text: str) -> str:
    """The words of a text: without case, punctuation, articles and extra space, as in SQuAD."""
    plain = _BEYOND_WORDS.sub(" ", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


def is_exact(answer: str, accepted: str) -> bool:
    return normalized(answer) == normalized(accepted)


def contains(answer: str, accepted: str) -> bool:
    """Whether the answer has the accepted words, whole and in their order."""
    return f" {normalized(accepted)} " in f" {normalized(answer)} "


def marked_number(text: str) -> Decimal | None:
    """The number after the last `####`."""
    found = _MARKED.findall(text)
    return _decimal(found[-1]) if found else None


def predicted_number(text: str) -> Decimal | None:
    """The marked number, or else the last one. `1,300`, `$1300` and `1300.0` are the same."""
    marked = marked_number(text)
    if marked is not None:
        return marked
    found = re.findall(_NUMBER, text)
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
