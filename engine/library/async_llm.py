"""`AsyncLLM`: the embedded engine for asyncio programs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from engine.core.interfaces.backend import ModelCard
from engine.core.interfaces.request import SamplingParams as WireParams
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.library.arguments import EngineArgs
from engine.library.embedded import EmbeddedEngine, Messages, Prompt
from engine.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput


class AsyncLLM:
    """A model that runs in this process, for asyncio. The engine has an event loop of its own, so
    an object may be used from several loops. `arguments` are those of `LLM`.

    The constructor returns when the model is loaded. `await AsyncLLM.load(...)` does not block the
    event loop meanwhile.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **arguments: Any) -> None:
        self.engine = EmbeddedEngine(EngineArgs.of(model=model, **arguments))

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> "AsyncLLM":
        made = cls.__new__(cls)
        made.engine = EmbeddedEngine(arguments)
        return made

    @classmethod
    async def load(cls, model: str = DEFAULT_MODEL, **arguments: Any) -> "AsyncLLM":
        return await asyncio.to_thread(cls, model, **arguments)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Stop the engine and free the model. Safe to call twice."""
        self.engine.close()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: WireParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the continuation of a prompt as it grows. `sampling_params.output_kind` selects
        whether an output has the whole text so far (the default), only new text, or the final text.
        """
        asked = self.engine.completion(prompt, sampling_params, request_id=request_id)
        return self._outputs(self.engine.stream(asked))

    def chat(
        self,
        messages: Messages,
        sampling_params: WireParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answer to a conversation as it grows. `options` are those of `LLM.chat`."""
        asked = self.engine.conversation(messages, sampling_params, options, request_id)
        return self._outputs(self.engine.stream(asked))

    async def embed(self, prompts: Prompt | list[Prompt]) -> list[EmbeddingRequestOutput]:
        """A unit-length vector for each prompt (text or token ids)."""
        return await asyncio.wrap_future(self.engine.submit(self.engine.embed(prompts)))

    async def score(
        self, data_1: Prompt | list[Prompt], data_2: Prompt | list[Prompt]
    ) -> list[ScoringRequestOutput]:
        """The similarity of texts, as `LLM.score` gives it."""
        return await asyncio.wrap_future(self.engine.submit(self.engine.score(data_1, data_2)))

    @property
    def card(self) -> ModelCard:
        """The model's description: context length, quantization, size."""
        return self.engine.card

    async def _outputs(
        self, source: AsyncIterator[RequestOutput]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass outputs from the engine's event loop to the caller's. If the caller stops reading,
        the request is aborted.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[RequestOutput | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for output in source:
                    loop.call_soon_threadsafe(arrived.put_nowait, output)
            finally:
                loop.call_soon_threadsafe(arrived.put_nowait, None)

        reading = asyncio.wrap_future(self.engine.submit(read()))
        try:
            while (output := await arrived.get()) is not None:
                yield output
            await reading
        finally:
            reading.cancel()
