"""One request on the frontend: token deltas in, typed events out.

The frontend owns text: it detokenizes whole characters, finds stop strings and tells the engine to
forget a choice that met one. Exactly one ending per choice, then one `UsageEvent`; or an
`EngineError`.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

from engine.backends.custom.text import TextModel
from engine.core.errors import EngineError, InferenceError, error_from_code
from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import GenerateRequest, TokenDelta, TokenLogprobs
from engine.core.utils.detokenizer import Detokenizer

# More deltas than this waiting for one reader are merged, so that a slow reader catches up.
MAX_BACKLOG = 8


class Generation:
    """Collects a request's deltas and turns them into events."""

    def __init__(
        self,
        request: GenerateRequest,
        text: TextModel,
        *,
        continuation: bool,
        forget: Callable[[int | None], None],
    ) -> None:
        self.request = request
        self._text = text
        self._forget = forget  # tells the engine to drop one choice, or all
        params = request.params
        self._open = {
            choice: Detokenizer(text.tokenizer, params.stop, continuation=continuation)
            for choice in range(params.n)
        }
        self._arrived: deque[TokenDelta | EngineError] = deque()
        self._wake = asyncio.Event()
        self._num_tokens = 0
        self._num_cached = 0
        self._queue_s = 0.0
        self._prefill_s = 0.0
        self._first_token_at: float | None = None

    def deliver(self, item: TokenDelta | EngineError) -> None:
        """Called by the link, in order: a delta of this request, or the engine's failure."""
        self._arrived.append(item)
        self._wake.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            while self._open:
                await self._wake.wait()
                self._wake.clear()
                while self._arrived:
                    for event in self._take(self._next_item()):
                        yield event
            yield self._usage()
        finally:
            if self._open:
                self._forget(None)

    def _next_item(self) -> TokenDelta | EngineError:
        """The oldest arrival, merged with its followers of the same choice when too many wait.

        Not where a stop string may cut: tokens behind it must be neither shown nor counted.
        """
        item = self._arrived.popleft()
        may_merge = not self.request.params.stop
        while may_merge and len(self._arrived) > MAX_BACKLOG and isinstance(item, TokenDelta):
            follower = self._arrived[0]
            if item.finish_reason or not isinstance(follower, TokenDelta):
                break
            if follower.choice != item.choice:
                break
            self._arrived.popleft()
            item = _merged(item, follower)
        return item

    def _take(self, item: TokenDelta | EngineError) -> Iterator[Event]:
        if isinstance(item, EngineError):
            raise item
        if item.choice not in self._open:
            return  # it met a stop string while more tokens were on their way
        if item.finish_reason == "error":
            code = item.error_code or InferenceError.code
            raise error_from_code(code, item.error_message or "The request failed.")
        if item.finish_reason == "abort":
            raise InferenceError("The request was aborted.")
        self._count(item)
        yield from self._decode(item)

    def _count(self, delta: TokenDelta) -> None:
        if delta.token_ids and self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._queue_s, self._prefill_s = delta.queue_s, delta.prefill_s
            self._num_cached = delta.num_cached
        self._num_tokens += len(delta.token_ids)

    def _decode(self, delta: TokenDelta) -> Iterator[Event]:
        detokenizer = self._open[delta.choice]
        ids = delta.token_ids
        # A stop id that the client named is no part of the text; an end-of-text id has none anyway.
        visible = ids[:-1] if delta.stop_token_id is not None else ids
        piece = detokenizer.push(visible)
        ends = delta.finish_reason is not None or detokenizer.stopped is not None
        if ends:
            piece += detokenizer.flush()
        logprobs = self._logprobs(delta)
        yield TextEvent(delta.choice, piece, len(ids), logprobs, ids)
        if not ends:
            return
        del self._open[delta.choice]
        if delta.finish_reason is None:
            self._forget(delta.choice)
        yield self._finish(delta, detokenizer.stopped)

    def _finish(self, delta: TokenDelta, stopped: str | None) -> FinishEvent:
        if stopped is not None:
            return FinishEvent(delta.choice, "stop", stopped)
        if delta.finish_reason == "length":
            return FinishEvent(delta.choice, "length")
        named = delta.stop_token_id in self.request.params.stop_token_ids
        return FinishEvent(delta.choice, "stop", delta.stop_token_id if named else None)

    def _logprobs(self, delta: TokenDelta) -> tuple[TokenText, ...] | None:
        if delta.logprobs is None:
            return None
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return tuple(self._token_text(token, logprobs) for token, logprobs in pairs)

    def _token_text(self, token_id: int, logprobs: TokenLogprobs) -> TokenText:
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        text, raw = self._literal(token_id)
        return TokenText(
            text, raw, logprobs.logprob, tuple(TopLogprob(*self._literal(i), lp) for i, lp in top)
        )

    def _literal(self, token_id: int) -> tuple[str, bytes]:
        raw = self._text.tokenizer.token_literal(token_id)
        return raw.decode("utf-8", "replace"), raw

    def _usage(self) -> UsageEvent:
        now = time.monotonic()
        return UsageEvent(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self._num_tokens,
            cached_tokens=self._num_cached,
            queue_s=self._queue_s,
            prefill_s=self._prefill_s,
            decode_s=now - self._first_token_at if self._first_token_at is not None else 0.0,
        )


def _merged(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return TokenDelta(
        first.request_id,
        first.choice,
        first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        num_cached=first.num_cached,
        queue_s=first.queue_s,
        prefill_s=first.prefill_s,
        error_code=second.error_code,
        error_message=second.error_message,
    )
