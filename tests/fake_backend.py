"""An `InferenceBackend` without a model, for tests of everything above one.

It answers with its `words`, at the pace that it is set to, and remembers what it was asked, how
many streams are open and how many were cut short.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError, InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    FinishEvent,
    GenerationContext,
    Health,
    ModelCard,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import EngineStats

MODEL = "tests/fake-model"
CONTEXT_LENGTH = 4096
DEFAULT_WORDS = ("Hello", " from", " a", " fake", " model", ".")


class FakeBackend(InferenceBackend):
    """One token per word; a prompt has as many tokens as words, or ids."""

    def __init__(self, words: Sequence[str] = DEFAULT_WORDS) -> None:
        self.reset(words)

    def reset(self, words: Sequence[str] = DEFAULT_WORDS) -> None:
        """As new, for a test that shares a server with others."""
        self.words = tuple(words)
        self.prefill_s = 0.0
        self.token_s: float | None = 0.0  # None: all tokens at once
        self.refusal: EngineError | None = None  # raised before the first event
        self.failure: Exception | None = None  # raised after `fail_after` tokens of a choice
        self.fail_after = 0
        self.ready = True
        self.start_error: EngineError | None = None
        self.stats_now: EngineStats | None = EngineStats(prefix_queries=100, prefix_hits=25)
        self.requests: list[ChatRequest | CompletionRequest] = []
        self.num_open = 0
        self.num_cut_short = 0
        self.is_stopped = False

    async def start(self) -> str:
        if self.start_error is not None:
            raise self.start_error
        return "fake://"

    async def stop(self) -> None:
        self.is_stopped = True

    def health(self) -> Health:
        detail = "ready" if self.ready else "loading weights"
        return Health(ready=self.ready, detail=detail, step_age_s=0.5)

    def memory_bytes(self) -> int:
        return 3 * 2**20

    def models(self) -> list[ModelCard]:
        return [
            ModelCard(
                id=MODEL,
                created=1_700_000_000,
                owned_by="tests",
                max_model_len=CONTEXT_LENGTH,
                backend="fake",
            )
        ]

    def stats(self) -> EngineStats | None:
        return self.stats_now

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        text = " ".join(message["content"] for message in request.messages)
        return self._answer(request.context, len(text.split()))

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        prompt = request.prompt
        num_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        return self._answer(request.context, num_tokens)

    async def _answer(self, context: GenerationContext, num_prompt: int) -> AsyncIterator[Event]:
        if self.refusal is not None:
            raise self.refusal
        if num_prompt >= CONTEXT_LENGTH:
            raise InvalidRequestError(
                f"This model's maximum context length is {CONTEXT_LENGTH} tokens."
                f" The prompt has {num_prompt}.",
                param="messages",
                code="context_length_exceeded",
            )
        self.num_open += 1
        finished = False
        try:
            await asyncio.sleep(self.prefill_s)
            words = self.words[: context.params.max_tokens]
            for position, word in enumerate(words):
                if self.failure is not None and position == self.fail_after:
                    raise self.failure
                for choice in range(context.params.n):
                    yield TextEvent(choice, word, 1, _logprobs(word, context.params.logprobs))
                if self.token_s is not None:
                    await asyncio.sleep(self.token_s)
            reason = "stop" if len(words) == len(self.words) else "length"
            for choice in range(context.params.n):
                yield FinishEvent(choice, reason)
            yield UsageEvent(
                prompt_tokens=num_prompt,
                completion_tokens=len(words) * context.params.n,
                cached_tokens=num_prompt // 2,
                queue_s=0.001,
                prefill_s=self.prefill_s,
                decode_s=(self.token_s or 0.0) * len(words),
            )
            finished = True
        finally:
            self.num_open -= 1
            self.num_cut_short += not finished


def _logprobs(word: str, num_top: int | None) -> tuple[TokenText, ...] | None:
    if num_top is None:
        return None
    top = tuple(TopLogprob(f"{word}{i}", b"x", -1.0 - i) for i in range(num_top))
    return (TokenText(word, word.encode(), float("-inf") if word == "." else -0.5, top),)
