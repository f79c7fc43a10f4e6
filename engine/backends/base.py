"""What every backend is to the server: a lifecycle, a state of health, models, and streams of typed
events.

The server, the CLI and the Python API hold an `InferenceBackend` and never ask which one it is.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
)
from engine.core.interfaces.request import EngineStats

EventSink: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True)
class BackendConfig:
    """What any backend needs to start; `backend_args` holds options that only one of them knows."""

    model_name: str = "openai-community/gpt2"
    host: str = "127.0.0.1"
    port: int = 8000
    backend_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The model that answers, and what a client should know if it asked for another."""

    card: ModelCard
    warning: str | None = None


class EventFeed(AsyncIterator[Event]):
    """A stream of events that can also be pushed, for a reader that is never behind: it need not
    be woken for every one. A stream is either read or fed, and once.
    """

    @abstractmethod
    async def feed(self, sink: EventSink) -> None:
        """Call `sink` with each event as it comes. Returns after the last, raises what a reader
        would be raised; cancelling it releases what the request held.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release what the request holds, however much of it was read."""


class Opening(EventFeed):
    """The events of a request that its backend opens when they are first asked for."""

    def __init__(
        self, backend: "InferenceBackend", request: ChatRequest | CompletionRequest
    ) -> None:
        self._backend = backend
        self._request = request
        self._reading = self._read()

    async def feed(self, sink: EventSink) -> None:
        source = await self._backend.open(self._request)
        try:
            await push_events(source, sink)
        finally:
            await close_events(source)

    async def __anext__(self) -> Event:
        return await anext(self._reading)

    async def aclose(self) -> None:
        await self._reading.aclose()

    async def _read(self) -> AsyncGenerator[Event, None]:
        source = await self._backend.open(self._request)
        try:
            async for event in source:
                yield event
        finally:
            await close_events(source)


async def push_events(source: AsyncIterator[Event], sink: EventSink) -> None:
    """Every event of `source` to `sink`, pushed where the source can push."""
    if isinstance(source, EventFeed):
        await source.feed(sink)
    else:
        async for event in source:
            sink(event)


async def close_events(source: AsyncIterator[Event]) -> None:
    """Release what the request of `source` holds, if it is of a kind that can be closed."""
    if isinstance(source, AsyncGenerator | EventFeed):
        await source.aclose()


class InferenceBackend(ABC):
    """A model, or several, that can be asked for text.

    `open`, `chat` and `complete` give an iterator of events (see `core.interfaces.backend`), which
    may be an `EventFeed`; closing it early, or cancelling the task that reads it, releases
    everything that the request held. `open` raises what a request is refused with, as far as the
    backend knows it at once; the rest, and all of it for `chat` and `complete`, is raised before
    the first event.
    """

    config_type: ClassVar[type[BackendConfig]] = BackendConfig
    # Whether the totals of `stats` go on when an engine is replaced, instead of beginning at zero.
    totals_survive_restarts: ClassVar[bool] = False

    @property
    def unwrapped(self) -> "InferenceBackend":
        """The backend itself, without what is put around it."""
        return self

    def rewrapped(self, inner: "InferenceBackend") -> "InferenceBackend":
        """What was put around this backend, around another one."""
        return inner

    @abstractmethod
    async def start(self) -> str:
        """Load and become ready; the address where the backend can be reached. Raises
        `EngineError`.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End every open stream with an error and release everything. Safe to call twice."""

    @abstractmethod
    def health(self) -> Health:
        """The state now, without waiting for anything."""

    @property
    def is_ready(self) -> bool:
        """Whether a request can be taken now; asked for every one of them."""
        return self.health().ready

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory resident in RAM, of every process that serves the models."""

    @abstractmethod
    def models(self) -> list[ModelCard]:
        """The models that can be asked for; the first is the default."""

    @abstractmethod
    def stats(self) -> EngineStats | None:
        """Gauges and totals of the engine behind this backend, if it reports any."""

    async def open(self, request: ChatRequest | CompletionRequest) -> AsyncIterator[Event]:
        """Have a request accepted; its events follow."""
        if isinstance(request, ChatRequest):
            return self.chat(request)
        return self.complete(request)

    @abstractmethod
    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Answer a conversation."""

    @abstractmethod
    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        """Continue a prompt."""

    def resolve(self, name: str | None) -> Resolved | None:
        """What a request for `name` would be answered by now; None: there is no such model. Without
        a name it is the default model. Raises `EngineError` if that can't be told yet.
        """
        for card in self.models():
            if name is None or card.id == name:
                return Resolved(card)
        return None

    def model_health(self, model_id: str) -> Health:
        """The state of one of the models."""
        return self.health()

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        """Who gave the answer to a request, or to the numbered ones that it was split into; empty
        where there is only one who could, or as long as nobody has begun.
        """
        return ()

    async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
        """Forget every cached prefix that no running request uses, of one model or of all; what was
        done, in words. Raises `EngineError` where it can't be done.
        """
        raise InvalidRequestError("This model's backend keeps no prefixes that can be flushed.")

    async def set_log_level(self, level: str) -> tuple[str, ...]:
        """How much the backend's own processes log, now and when they are started again; a word on
        each that could not be told. What runs elsewhere decides that for itself.
        """
        return ()

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """One vector for each input."""
        raise InvalidRequestError("This model gives no embeddings.", param="model")

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The ids that a conversation, or a text, would become. `model` as in a request."""
        raise InvalidRequestError("This model's backend does not tell its tokens.", param="model")

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        """The text of token ids, control tokens by name."""
        raise InvalidRequestError("This model's backend does not tell its tokens.", param="model")


class BackendHolder:
    """The backend that a server asks now. It changes when a server with one model is given more."""

    def __init__(self, current: InferenceBackend) -> None:
        self.current = current
