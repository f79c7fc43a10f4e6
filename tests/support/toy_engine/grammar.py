"""Grammars over the toy model's vocabulary, in which every token is a letter."""

from concurrent.futures import Future
from functools import lru_cache

from engine.runtime.requests.grammar import Grammars, Vocabulary
from tests.support.toy_engine.runner import CRASH_TOKEN, NAN_TOKEN, VOCAB

END = VOCAB - 3
TEXT = [bytes([ord("a") + token]) for token in range(VOCAB)]


def vocabulary() -> Vocabulary:
    special = frozenset({END, NAN_TOKEN, CRASH_TOKEN})
    return Vocabulary(TEXT, special, (END,), lambda text: [ord(c) - ord("a") for c in text])


@lru_cache
def lark(regex: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


def text_of(tokens: list[int]) -> str:
    return b"".join(TEXT[token] for token in tokens if token != END).decode()


@lru_cache
def _shared() -> Grammars:
    return Grammars(vocabulary)


def new_matcher(grammar: str):
    """A matcher in its start state."""
    return _shared().compile(grammar).result().deep_copy()


class PatientGrammars(Grammars):
    """Compiles only when told to, so that histories are reproducible."""

    def __init__(self) -> None:
        super().__init__(vocabulary)
        self._waiting: list[tuple[str, Future]] = []

    def compile(self, grammar: str) -> Future:
        self._waiting.append((grammar, Future()))
        return self._waiting[-1][1]

    def finish(self) -> None:
        """Compile everything that was requested so far."""
        for grammar, future in self._waiting:
            future.set_result(new_matcher(grammar))
        self._waiting.clear()
