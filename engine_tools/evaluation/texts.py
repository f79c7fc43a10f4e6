"""Compares an answer's text with what was expected: equal, contained, or the same number."""

import re
import unicodedata
from decimal import Decimal, InvalidOperation

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ARTICLES = ("a", "an", "the")
_BEYOND_WORDS = re.compile(r"[^\w\s]")


def normalized(text: str, *, keeps_articles: bool = False) -> str:
    """The words of a text: without case, punctuation, articles and extra space, as in SQuAD."""
    plain = _BEYOND_WORDS.sub(" ", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(word for word in plain.split() if keeps_articles or word not in _ARTICLES)


def is_exact(answer: str, accepted: str) -> bool:
    own, wanted = _words(answer, accepted)
    return own == wanted


def contains(answer: str, accepted: str) -> bool:
    """Whether the answer has the accepted words, whole and in their order."""
    own, wanted = _words(answer, accepted)
    return f" {wanted} " in f" {own} "


def _words(answer: str, accepted: str) -> tuple[str, str]:
    """Both texts, normalized. Articles stay if the accepted answer is one, such as the letter A."""
    is_article = not normalized(accepted)
    own, wanted = (normalized(each, keeps_articles=is_article) for each in (answer, accepted))
    return own, wanted


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
