"""The text that accuracy is measured on: windows of tokens, and passages with a last word."""

import bisect
import re
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).parents[2] / "tests" / "data" / "alice.txt"
WINDOW, WINDOWS = 512, 40
MIN_LETTERS = 5  # min length of the word to find
MIN_WORDS = 40  # min words before it

_WORD = re.compile(r"[A-Za-z]+")
_SENTENCE_END = re.compile(r"[.!?]['\")]*\s+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences up to the space before `word`, which also occurs earlier in them."""

    context: str
    word: str


def read_text() -> str:
    return TEXT.read_text(encoding="ascii")


def windows(token_ids: list[int]) -> list[list[int]]:
    """The first 20,480 tokens, cut as `llama-perplexity -c 512 --chunks 40` cuts them."""
    return [token_ids[at : at + WINDOW] for at in range(0, WINDOW * WINDOWS, WINDOW)]


def passages(text: str) -> list[Passage]:
    """One passage for each word of five or more letters that occurs earlier in its passage.

    A passage starts with the latest sentence that leaves at least 40 words before the last one.
    """
    words = list(_WORD.finditer(text))
    starts = [0, *(end.end() for end in _SENTENCE_END.finditer(text))]
    found = []
    for index, word in enumerate(words[MIN_WORDS:]):
        if len(word[0]) < MIN_LETTERS:
            continue
        start = starts[bisect.bisect_right(starts, words[index].start()) - 1]
        context = text[start : word.start() - 1]
        follows_a_word = text[word.start() - 1] == " " and not context[-1:].isspace()
        if follows_a_word and re.search(rf"\b{word[0]}\b", context, re.IGNORECASE):
            found.append(Passage(context, word[0]))
    return found
