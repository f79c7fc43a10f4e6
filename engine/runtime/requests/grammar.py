"""Constrained output: compiles grammars, and computes which tokens they allow in each step (masks).

A dedicated thread compiles grammars, so that a large grammar does not block the engine loop. Masks
are computed in a thread, too, while the forward pass runs. This needs the last token of a row. With
overlapped steps, that token may still be on the device. Then the mask is computed when the token
arrives, while the device already runs the next forward pass.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from engine.core.errors import EngineError, InferenceError, InvalidRequestError
from engine.core.grammar.limits import parser_limits
from engine.runtime.model_runner import ALL_ALLOWED, U32

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.core.text.tokenizer import Tokenizer
    from engine.runtime.sequence import ScheduledBatch

log = logging.getLogger(__name__)

MaskRow: TypeAlias = "tuple[LLMatcher, int]"  # a matcher, and the index of its row in the mask
# Max number of compiled grammars that are kept. The limit bounds memory, because a compiled grammar
# also keeps the lexer states that it has visited.
MAX_COMPILED = 128
MAX_MASK_THREADS = 4
# For llguidance, the text of a special token starts with this byte, which no UTF-8 text contains.
SPECIAL_MARK = b"\xff"


@dataclass(frozen=True)
class Vocabulary:
    """What grammars need from a tokenizer. `tokens` has the bytes of every token, by token id."""

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, tokenizer: "Tokenizer", vocab_size: int, eos_ids: Iterable[int]) -> "Vocabulary":
        """The vocabulary of a model. Ids that only pad its embedding table have empty tokens."""
        return cls(
            tokens=[tokenizer.token_literal(i) for i in range(vocab_size)],
            special_ids=tokenizer.special_ids,
            eos_ids=tuple(sorted({*eos_ids, *tokenizer.eos_ids})),
            # A grammar starts behind the prompt, so its first text has no added space.
            encode=tokenizer.encode_continuation,
        )


class Constraint:
    """The grammar of one sequence, with the current position in it."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher

    @classmethod
    def after(cls, start: "LLMatcher", tokens: Sequence[int]) -> "Constraint":
        """The constraint of a sequence that has generated `tokens`. `start` is a matcher in its
        start state, which is copied.
        """
        matcher = start.deep_copy()
        if tokens and not matcher.consume_tokens(list(tokens)):
            raise InferenceError("The grammar does not match the output so far.")
        return cls(matcher)

    def accept(self, token: int, is_stop: bool) -> bool:
        """Advance past a sampled token. A stop token does not advance, because it is not part of
        the output.

        Returns False if the sequence cannot continue. Then `error` says why. One reason is that the
        mask could not be computed. Then only the end-of-text token was allowed, and the matcher
        reports an error.
        """
        if self.matcher.is_error():
            return False
        return is_stop or self.matcher.consume_token(token)

    def num_allowed(self, draft: list[int]) -> int:
        """How many tokens of a draft the grammar allows."""
        return self.matcher.validate_tokens(draft)

    def past(self, draft: tuple[int, ...]) -> "LLMatcher":
        """A matcher that has advanced past a draft, all of whose tokens the grammar allows."""
        if not draft:
            return self.matcher
        matcher = self.matcher.deep_copy()
        matcher.consume_tokens(list(draft))
        return matcher

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows no further token except the end of the output."""
        return self.matcher.is_stopped()

    @property
    def error(self) -> EngineError:
        return InvalidRequestError(
            "The grammar became too complex to follow, or logit_bias, min_tokens or stop_token_ids "
            "ban every token that it allows; simplify it, or allow one of them."
        )


class Grammars:
    """Compiles grammars for one model. llguidance and the vocabulary are loaded by `prepare`, or
    else when the first grammar is compiled.
    """

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._preparing: Future[LLTokenizer] | None = None

    def prepare(self) -> None:
        """Start to load the vocabulary. An engine does so while it reads its weights, because
        llguidance holds Python's lock for long, and nobody waits for the engine's loop yet.
        """
        self._preparing = self._thread.submit(self._loaded)

    def finish_preparing(self) -> None:
        """Wait until the vocabulary is loaded. A model without a usable one answers requests that
        have no grammar, and the first grammar gets the error.
        """
        error = None if self._preparing is None else self._preparing.exception()
        if error is not None:
            log.warning("grammars can't be used: %s", error)

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """Starts to compile a grammar. The result is a matcher in its start state. Requests share
        it, so copy it before use. If compiling fails, the future raises an `EngineError`.
        """
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
        """Compile a grammar. If compiling fails for a reason other than the grammar itself, it is
        tried once more, because many requests may wait for the same grammar.
        """
        try:
            return self._compile_once(grammar)
        except InferenceError:
            return self._compile_once(grammar)

    def _compile_once(self, grammar: str) -> "LLMatcher":
        try:
            matcher = self._new_matcher(grammar)
        except EngineError:
            raise
        except BaseException as error:  # a panic in the Rust library is a BaseException
            log.exception("a grammar could not be compiled")
            raise InferenceError("The grammar could not be compiled.") from error
        if matcher.is_error():
            raise InvalidRequestError(f"The grammar can't be compiled: {matcher.get_error()}")
        return matcher

    def _new_matcher(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._loaded(), grammar, log_level=0, limits=parser_limits())

    def _loaded(self) -> "LLTokenizer":
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._load_vocabulary())
        return self._tokenizer


def _may_succeed_next_time(compiled: "Future[LLMatcher]") -> bool:
    """Whether compiling failed for a reason other than the grammar itself."""
    error = compiled.exception() if compiled.done() else None
    return error is not None and not isinstance(error, InvalidRequestError)


class _WrappedVocabulary:
    """Adapts `Vocabulary` to the tokenizer interface that llguidance expects."""

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
    """Computes the token masks of a step's constrained rows in parallel."""

    def __init__(self, vocab_size: int) -> None:
        from llguidance import LLExecutor

        self._num_words = -(-vocab_size // 32)
        self._executor = LLExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, num_rows: int, known: list[MaskRow]) -> "MaskJob":
        """Allocate masks for `num_rows` rows. Starts a thread that computes the masks of the rows
        in `known`.
        """
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
    """The token masks of one step, while they are computed."""

    mask: U32
    done: frozenset[int]  # rows whose computation was started in `begin`
    computing: "Future[None] | None"
    writer: MaskWriter

    def finish(self, late: list[MaskRow]) -> U32:
        """Wait for the masks that `begin` started to compute. Then compute the masks of the rows in
        `late`. Returns the masks of all rows.
        """
        if self.computing is not None:
            self.computing.result()
        if late:
            self.writer.fill(self.mask, late)
        return self.mask


def constrained_rows(
    batch: "ScheduledBatch", only_known: bool, done: frozenset[int] = frozenset()
) -> list[MaskRow]:
    """The grammar matchers of the batch, each with the index of its row among the rows that sample.
    Rows whose index is in `done` are left out.

    With `only_known`, rows whose last token is still on the device are left out, too.
    """
    sampling = (each for row in batch.rows if row.samples for each in row.sampled)
    return [
        (constraint.past(row.draft), index)
        for index, row in enumerate(sampling)
        if (rules := row.seq.rules) is not None
        and (constraint := rules.constraint) is not None
        and row.seq.finish_reason is None
        and index not in done
        and not (only_known and row.start + row.length - len(row.draft) > len(row.seq.tokens))
    ]
