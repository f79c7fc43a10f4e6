"""Texts of models without a tokenizer: each token is a few bytes, chosen so that answers meet stop
strings, characters of several tokens, tool calls and reasoning.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

from engine.core.parsing.output import OutputFormat
from engine.frontend.text_model import TextModel
from engine.runtime.requests.grammar import Grammars, Vocabulary
from tests.support.toy_engine import backend as toy_backend

LITERALS = (
    *(b"a", b"b", b"ab", b" ", b"\xc3", b"\xa9", b"1", b"2", b"\n", b"<think>", b"</think>"),
    *(b"<tool_call>", b"</tool_call>", b'{"name": "f", "arguments": ', b'{"x": ', b"}", b"}}"),
    *(b'"', b"c", b", ", b"ba"),
)
STOPS = ("ab", "b\n", "é", "1a", "aa", "}}")
STOP_PATTERNS = ("(ab|ba)+c", "[12]{2}")
BAD_WORDS = ("ab", "b", "1 2", "cc")
BREAKERS = ("\n", "b")
REGEXES = ("(ab|ba|é)+c", "a{3}b?", '("[ab1]*",? ?)+', "[ab]{2,12}(12)?", "1(2|1)* c")
OUTPUT = OutputFormat.of("{{ tools }}<tool_call></tool_call><think></think>", {})


class TokenTexts:
    """The texts of a vocabulary, and its grammars. `special` tokens are no part of a text."""

    def __init__(self, literals: Sequence[bytes], special: frozenset[int], end: int) -> None:
        self._literals, self._special, self._end = tuple(literals), special, end
        plain = [token for token in range(len(literals)) if token not in special]
        self._longest_first = sorted(plain, key=lambda token: -len(literals[token]))
        self._texts = tuple(
            b"" if token in special else raw for token, raw in enumerate(self._literals)
        )
        self._compiled: dict[str, Future[Any]] = {}

    def encoded(self, text: str) -> list[int]:
        """The longest token first, so a text has one encoding. Bytes without a token are lost."""
        raw, found = text.encode(), list[int]()
        while raw:
            starts = (each for each in self._longest_first if raw.startswith(self._literals[each]))
            token = next(starts, None)
            found += [] if token is None else [token]
            raw = raw[1 if token is None else len(self._literals[token]) :]
        return found

    @cached_property
    def model(self) -> TextModel:
        literals, texts, special = self._literals, self._texts, self._special

        def decode(ids: Sequence[int], skip_special: bool = True) -> str:
            table = texts if skip_special else literals
            return b"".join(table[each] for each in ids).decode("utf-8", "replace")

        tokenizer = SimpleNamespace(
            eos_ids=(self._end,),
            drops_leading_space=False,
            chat_template="toy",
            bytes_table=lambda skip_special, shown=(): texts if skip_special else literals,
            token_literal=lambda token: literals[token],
            is_special=lambda token: token in special,
            encode=lambda text, parse_special=False: self.encoded(text),
            encode_continuation=self.encoded,
            sequences_with=lambda text: (tuple(self.encoded(text)),),
            decode=decode,
        )
        return replace(toy_backend.TEXT, tokenizer=tokenizer)

    @cached_property
    def _grammars(self) -> Grammars:
        vocabulary = Vocabulary(self._literals, self._special, (self._end,), self.encoded)
        return Grammars(lambda: vocabulary)

    def compile(self, grammar: str) -> "Future[Any]":
        """Compile a grammar, and wait for it."""
        if grammar not in self._compiled:
            future = self._grammars.compile(grammar)
            future.exception()
            self._compiled[grammar] = future
        return self._compiled[grammar]


@lru_cache(maxsize=64)
def regex_grammar(regex: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)
