"""What a sequence's output must match: compiled grammars, and the masks of a step.

Compiling happens in one thread of its own, so a large grammar delays only its own request. Masks
are computed there too, while the forward pass runs: for every row whose tokens are known when the
pass begins, which without overlap is all of them. The rest, whose last token was still on the
device, is computed when that token arrives; the device is busy with the next pass meanwhile.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from engine.backends.custom.runtime.model_runner import U32
from engine.core.errors import EngineError, InferenceError, InvalidRequestError
from engine.core.grammar.limits import parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

MaskRow: TypeAlias = "tuple[LLMatcher, int]"  # and its row of the masks
# A compiled grammar keeps its lexer's states, so the number is the bound on memory.
MAX_COMPILED = 128
MAX_MASK_THREADS = 4
ALL_ALLOWED = 0xFFFFFFFF
# How llguidance marks the bytes of a token that no text can spell.
SPECIAL_MARK = b"\xff"


@dataclass(frozen=True)
class Vocabulary:
    """What grammars need of a tokenizer. `tokens` has an entry for every id of the model."""

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


class Constraint:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher

    def accept(self, token: int, is_stop: bool) -> bool:
        """Move past a drawn token; a stop is no part of the output. False: it can't go on, and
        `error` says why. Where a mask could not be computed, nothing but the end was allowed.
        """
        if self.matcher.is_error():
            return False
        return is_stop or self.matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Nothing more can follow but the end."""
        return self.matcher.is_stopped()

    @property
    def error(self) -> EngineError:
        return InvalidRequestError(
            "The grammar became too complex to follow, or logit_bias, min_tokens or stop_token_ids "
            "ban every token that it allows; simplify it, or allow one of them."
        )


class Grammars:
    """Compiles grammars for one model. Nothing is loaded before the first one is asked for."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """The matcher at its start, to be copied. Fails with an `EngineError`."""
        known = self._compiled.get(grammar)
        if known is None or _may_succeed_next_time(known):
            known = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> "LLMatcher":
        """Tried twice if it fails by no fault of the grammar: many may be waiting for it."""
        try:
            return self._compile_once(grammar)
        except InferenceError:
            return self._compile_once(grammar)

    def _compile_once(self, grammar: str) -> "LLMatcher":
        try:
            matcher = self._new_matcher(grammar)
        except EngineError:
            raise
        except BaseException as error:  # a panic in the library is not an Exception
            log.exception("a grammar could not be compiled")
            raise InferenceError("The grammar could not be compiled.") from error
        if matcher.is_error():
            raise InvalidRequestError(f"The grammar can't be compiled: {matcher.get_error()}")
        return matcher

    def _new_matcher(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._load_vocabulary())
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())


def _may_succeed_next_time(compiled: "Future[LLMatcher]") -> bool:
    """It failed by no fault of the grammar."""
    error = compiled.exception() if compiled.done() else None
    return error is not None and not isinstance(error, InvalidRequestError)


class _WrappedVocabulary:
    """The attributes and the call that llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.tokens = [
            SPECIAL_MARK + token if index in vocabulary.special_ids else token
            for index, token in enumerate(vocabulary.tokens)
        ]

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _tokenizer(vocabulary: Vocabulary) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    if not vocabulary.eos_ids:
        raise InvalidRequestError("This model has no end-of-text token, so no grammar can end.")
    return LLTokenizer(
        TokenizerWrapper(_WrappedVocabulary(vocabulary)),
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.eos_ids),
    )


class MaskWriter:
    """Computes the masks of a step's rows, several at once."""

    def __init__(self, vocab_size: int) -> None:
        from llguidance import LLExecutor

        self._num_words = -(-vocab_size // 32)
        self._executor = LLExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, num_rows: int, known: list[MaskRow]) -> "MaskJob":
        """Masks for `num_rows`; the `known` ones are computed from now on."""
        mask = np.full((num_rows, self._num_words), ALL_ALLOWED, np.uint32)
        done = frozenset(index for _, index in known)
        computing = self._thread.submit(self.fill, mask, known) if known else None
        return MaskJob(mask, done, computing, self)

    def fill(self, mask: U32, rows: list[MaskRow]) -> None:
        self._executor.unsafe_compute_mask_ptr(
            rows, mask.ctypes.data, self._num_words * mask.itemsize, len(mask)
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False)


@dataclass(frozen=True)
class MaskJob:
    """Masks on their way."""

    mask: U32
    done: frozenset[int]  # rows that are being computed
    computing: "Future[None] | None"
    writer: MaskWriter

    def finish(self, rows: list[MaskRow]) -> U32:
        """The masks of all these rows."""
        if self.computing is not None:
            self.computing.result()
        late = [row for row in rows if row[1] not in self.done]
        if late:
            self.writer.fill(self.mask, late)
        return self.mask
