"""llama.cpp's reports in a stream of chunks: how much of the prompt is computed
(`return_progress`), and how long prompt and answer took so far (`timings_per_token`).
"""

import time
from typing import Any, Protocol

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import PromptProgress, TextEvent, UsageEvent
from engine.servers.serving.event_pump import EventPump, OutputEvent
from engine.servers.serving.sse import DONE, StreamFormat

_encode = msgspec.json.Encoder().encode
_END = b"}\n\n"


def timings(usage: UsageEvent) -> dict[str, float]:
    """llama.cpp's figures of one prompt and its answer. The first token is a result of the prompt,
    so the rate of the answer counts the other tokens.
    """
    num_computed = usage.prompt_tokens - usage.cached_tokens
    num_steps = max(usage.completion_tokens - 1, 0)
    drafts = {"draft_n": usage.num_drafted, "draft_n_accepted": usage.num_accepted}
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": num_computed,
        "prompt_ms": 1e3 * usage.prefill_s,
        "prompt_per_token_ms": _ratio(1e3 * usage.prefill_s, num_computed),
        "prompt_per_second": _ratio(num_computed, usage.prefill_s),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": 1e3 * usage.decode_s,
        "predicted_per_token_ms": _ratio(1e3 * usage.decode_s, num_steps),
        "predicted_per_second": _ratio(num_steps, usage.decode_s),
        **(drafts if usage.num_drafted else {}),
    }


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


class BlankStream(Protocol):
    """A format of chunks that can write a chunk without text."""

    def blank(self, choice: int) -> bytes: ...


class ReportingStream:
    """Adds reports to the chunks of a stream. `blank` writes chunks without text, and `inner` all
    others.
    """

    def __init__(
        self,
        inner: StreamFormat,
        blank: BlankStream,
        pump: EventPump,
        *,
        with_progress: bool,
        with_timings: bool,
    ) -> None:
        self._inner = inner
        self._blank = blank
        self._pump = pump
        self._with_progress = with_progress
        self._with_timings = with_timings
        self._num_tokens = [0] * len(pump.choice_tokens)
        self._progress = PromptProgress(0, 0, 0, 0.0)  # of the prompt that reported last

    def opening(self) -> bytes:
        return self._inner.opening()

    def chunk(self, event: OutputEvent) -> bytes:
        if not isinstance(event, TextEvent):
            return self._timed(event.choice, self._inner.chunk(event))
        if event.progress is None:
            self._num_tokens[event.choice] += event.num_tokens
            return self._timed(event.choice, self._inner.chunk(event))
        self._progress = event.progress
        if not self._with_progress:
            return b""
        report = {
            "total": event.progress.total,
            "cache": event.progress.cached,
            "processed": event.progress.processed,
            "time_ms": round(1e3 * event.progress.seconds),
        }
        chunk = _with(self._blank.blank(event.choice), "prompt_progress", report)
        return self._timed(event.choice, chunk)

    def closing(self, usage: UsageEvent) -> bytes:
        closing = self._inner.closing(usage)
        chunk = closing.removesuffix(DONE)
        if not (chunk and self._with_timings) or chunk == closing:
            return closing
        return _with(chunk, "timings", timings(usage)) + DONE

    def failure(self, error: EngineError) -> bytes:
        return self._inner.failure(error)

    def _timed(self, choice: int, chunk: bytes) -> bytes:
        if not (chunk and self._with_timings):
            return chunk
        first_at = self._pump.first_token_at if self._num_tokens[choice] else None
        so_far = UsageEvent(
            prompt_tokens=self._progress.processed,
            completion_tokens=self._num_tokens[choice],
            cached_tokens=self._progress.cached,
            prefill_s=self._progress.seconds,
            decode_s=0.0 if first_at is None else time.monotonic() - first_at,
        )
        return _with(chunk, "timings", timings(so_far))


def _with(chunk: bytes, name: str, value: dict[str, Any]) -> bytes:
    """Add a field to a chunk. If there are several chunks, the last one gets it."""
    assert chunk.endswith(_END)
    return chunk[: -len(_END)] + b',"' + name.encode() + b'":' + _encode(value) + _END
