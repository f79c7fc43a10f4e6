"""A backend that answers a number of requests and then hangs, for tests of interrupted work."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from engine.core.interfaces.backend import ChatRequest, Event, FinishEvent
from tests.support.fakes.fake_backend import DEFAULT_WORDS, FakeBackend


class StoppingBackend(FakeBackend):
    def reset(self, words: Sequence[str] = DEFAULT_WORDS) -> None:
        super().reset(words)
        self.num_answers: int | None = None  # None: answer all requests
        self.num_held = 0  # requests that are waiting for an answer

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        if self.num_answers is None or len(self.requests) < self.num_answers:
            return super().chat(request)
        self.requests.append(request)
        return self._hold(request)

    async def _hold(self, request: ChatRequest) -> AsyncIterator[Event]:
        if request.context.on_prompt is not None:
            request.context.on_prompt(None)
        self.num_held += 1
        try:
            await asyncio.Event().wait()
            yield FinishEvent(0, "stop")
        finally:
            self.num_held -= 1


def stopping_after(num_answers: int) -> StoppingBackend:
    backend = StoppingBackend()
    backend.num_answers = num_answers
    return backend
