"""The backend interface: lifecycle, health, models, and streams of typed events.

The server, the CLI and the Python API hold an `InferenceBackend` and never check which kind it is.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypedDict, Unpack

from engine.core.errors import ContextLengthError, InvalidRequestError, NotFoundError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
    TokenizerInfo,
)
from engine.core.interfaces.request import GenerateRequest
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats

EventSink: TypeAlias = Callable[[Event], None]


class Tokenizing(TypedDict, total=False):
    """How a text becomes token ids."""

    add_special_tokens: bool  # those around a text; True by default
    parse_special: bool  # names of control tokens become these tokens; False by default


@dataclass(frozen=True)
class BackendConfig:
    """Settings that any backend needs to start. `backend_args` has options that only one kind of
    backend knows.
    """

    model_name: str = "openai-community/gpt2"
    host: str = "127.0.0.1"
    port: int = 8000
    backend_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The model that will answer, and a note for the client if this is not the requested model."""

    card: ModelCard
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayedTokens:
    """The tokens of a request that was run again, and the fingerprint of the model."""

    token_ids: dict[int, list[int]]  # of each choice
    fingerprint: str


@dataclass(frozen=True, slots=True)
class InterruptedRequest:
    """An open request whose engine died. A backend with the same fingerprint may continue it.
    `state` is only known to the kind of backend that made it.
    """

    request_id: str
    fingerprint: str
    state: object


class EventFeed(AsyncIterator[Event]):
    """A stream of events that can be read with `async for`, or pushed to a function by `feed`.
    Pushing is faster, because no task is woken for each event. A stream is read or pushed, never
    both, and only once.
    """

    @abstractmethod
    async def feed(self, sink: EventSink) -> None:
        """Call `sink` with each event as it arrives. Returns after the last event. Raises the same
        errors as `async for`. If the call is cancelled, the backend releases what the request
        holds.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release what the request holds in the backend. May be called before the stream ends."""


class GeneratedFeed(EventFeed):
    """Base class of an `EventFeed` that has an async generator for reading."""

    def __init__(self) -> None:
        self._reading = self._read()

    @abstractmethod
    def _read(self) -> AsyncGenerator[Event, None]: ...

    async def __anext__(self) -> Event:
        return await anext(self._reading)

    async def aclose(self) -> None:
        await self._reading.aclose()


class Opening(GeneratedFeed):
    """The events of a request. The request is submitted when the first event is read."""

    def __init__(
        self, backend: "InferenceBackend", request: ChatRequest | CompletionRequest
    ) -> None:
        super().__init__()
        self._backend = backend
        self._request = request

    async def feed(self, sink: EventSink) -> None:
        source = await self._backend.open(self._request)
        try:
            await push_events(source, sink)
        finally:
            await close_events(source)

    async def _read(self) -> AsyncGenerator[Event, None]:
        source = await self._backend.open(self._request)
        try:
            async for event in source:
                yield event
        finally:
            await close_events(source)


async def push_events(source: AsyncIterator[Event], sink: EventSink) -> None:
    """Pass all events of `source` to `sink`. The source pushes them if it is an `EventFeed`."""
    if isinstance(source, EventFeed):
        await source.feed(sink)
    else:
        async for event in source:
            sink(event)


async def close_events(source: AsyncIterator[Event]) -> None:
    """Close `source` if it can be closed, which releases what the request holds."""
    if isinstance(source, AsyncGenerator | EventFeed):
        await source.aclose()


class InferenceBackend(ABC):
    """One or several models that generate text.

    `open`, `chat` and `complete` return an iterator of events (see `core.interfaces.backend`),
    which may be an `EventFeed`. Closing it early, or cancelling the task that reads it, releases
    everything that the request held. `open` raises a refusal if the backend knows it at once. Later
    refusals, and all refusals of `chat` and `complete`, are raised before the first event.
    """

    config_type: ClassVar[type[BackendConfig]] = BackendConfig
    # Whether the totals of `stats` continue when an engine is replaced, instead of restarting at
    # zero.
    totals_survive_restarts: bool = False
    # Set by a router, and called when an engine died. Returns whether another backend continues the
    # request.
    on_interrupted: Callable[[InterruptedRequest], bool] | None = None

    @property
    def is_accelerated(self) -> bool:
        """Whether an engine of ours runs on an accelerator of this machine. Then it may generate
        tokens faster than one frontend process can send them.
        """
        return False

    @property
    def unwrapped(self) -> "InferenceBackend":
        """The innermost backend, without wrappers such as plugins."""
        return self

    def rewrapped(self, inner: "InferenceBackend") -> "InferenceBackend":
        """Put the wrappers of this backend around `inner`, and return the result."""
        return inner

    @abstractmethod
    async def start(self) -> str:
        """Load the models and wait until the backend is ready. Returns its address. Raises
        `EngineError` on failure.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End all open streams with an error and free all resources. Idempotent."""

    @abstractmethod
    def health(self) -> Health:
        """The current state of the backend. Never waits for an answer of its processes."""

    @property
    def is_ready(self) -> bool:
        """Whether a request can be admitted now. Called for every request. An engine that is being
        restarted may admit requests, which wait for it.
        """
        return self.health().ready

    def take_over(self, interrupted: InterruptedRequest) -> bool:
        """Continue a request of another backend, whose engine died. Returns False if this backend
        can't.
        """
        return False

    @abstractmethod
    def memory_bytes(self) -> int:
        """Resident memory of every process that serves the models."""

    @abstractmethod
    def models(self) -> list[ModelCard]:
        """The available models. The first one is the default model."""

    @abstractmethod
    def stats(self) -> EngineStats | None:
        """Gauges and totals of the engine. None if it reports none."""

    async def open(self, request: ChatRequest | CompletionRequest) -> AsyncIterator[Event]:
        """Submit a request. Returns its events."""
        if isinstance(request, ChatRequest):
            return self.chat(request)
        return self.complete(request)

    @abstractmethod
    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        """The events of the answer to a conversation."""

    @abstractmethod
    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        """The events of the continuation of a prompt."""

    def resolve(self, name: str | None) -> Resolved | None:
        """The model that would now answer a request for `name`. Returns None if there is no such
        model. If `name` is None, the default model is meant. Raises `EngineError` if the model is
        still loading, so that its card is not known yet.
        """
        for card in self.models():
            if name is None or card.id == name:
                return Resolved(card)
        return None

    def model_health(self, model_id: str) -> Health:
        """The state of one model."""
        return self.health()

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        """Names of the replicas that answered a request. The prompts of one request may be answered
        by several replicas. Empty if the server has no router, or before the first event.
        """
        return ()

    async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
        """Drop all cached prefixes that no running request uses. If `model` is empty, this is done
        for all models. Returns descriptions of what was done. Raises `EngineError` if the backend
        can't do it.
        """
        raise InvalidRequestError("This model's backend keeps no prefixes that can be flushed.")

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        """What each of our own engines is doing now, by the name of its replica. Engines that do
        not answer are left out.
        """
        return {}

    async def replay(self, request: GenerateRequest, *, model: str = "") -> ReplayedTokens:
        """Run a recorded request again. `model` is the id of the model that answered it."""
        raise InvalidRequestError("This model's backend can't run a recorded request again.")

    def files_of(self, model: str) -> Path | None:
        """The files of a model that our own engine runs, by the model's id. None for others. An
        empty id is that of a backend's only model.
        """
        return None

    async def sites(self, *, model: str = "") -> list[dict[str, Any]]:
        """The places inside the model that interpretability requests can read and change: name,
        shape of one token's value, and whether it can be edited.
        """
        raise InvalidRequestError("This model's backend shows no activations.", param="model")

    async def set_log_level(self, level: str) -> tuple[str, ...]:
        """Set the log level of the backend's processes. It also holds after their restart. Returns
        a note for each process that could not be changed. Remote servers are not affected.
        """
        return ()

    @property
    def adapters(self) -> Mapping[str, str]:
        """The paths of the LoRA adapters that are served, by name."""
        return {}

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        """Load the LoRA adapter at `path`, and serve it as the model `name` from now on. `base` is
        the id of the base model; None: the only model. Raises `EngineError` if it can't be served.
        With `replaces`, an adapter of this name is replaced.
        """
        raise InvalidRequestError("This model's backend serves no LoRA adapters.")

    async def unload_adapter(self, name: str) -> None:
        """Serve a LoRA adapter no longer. Requests that have begun are finished."""
        raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Returns one embedding vector for each input."""
        raise InvalidRequestError("This model gives no embeddings.", param="model")

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        """Token ids of a conversation or a text. `model` is a model id; empty means the default."""
        raise InvalidRequestError("This model's backend shares no tokenizer.", param="model")

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        """The text of token ids. Control tokens are shown by their names."""
        raise InvalidRequestError("This model's backend shares no tokenizer.", param="model")

    async def token_bytes(self, token_ids: tuple[int, ...], *, model: str = "") -> list[bytes]:
        """The text of each token by itself, in UTF-8. A token may be part of a character. Control
        tokens are shown by their names.
        """
        texts = [await self.detokenize((each,), model=model) for each in token_ids]
        return [text.encode() for text in texts]

    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo | None:
        """A description of the model's tokenizer. None if the backend does not know it."""
        return None


class BackendHolder:
    """Holds the server's current backend. A server with one model replaces its backend by a router
    when a second model is added.
    """

    def __init__(self, current: InferenceBackend) -> None:
        self.current = current


def check_context(num_prompt: int, max_tokens: int | None, max_seq_len: int, param: str) -> None:
    """Check that prompt and max_tokens fit the context. Some clients recognize this error by its
    first sentence.
    """
    asked = max_tokens or 0
    if num_prompt + asked > max_seq_len or num_prompt >= max_seq_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_seq_len} tokens. However, you requested "
            f"{num_prompt + asked} tokens ({num_prompt} in the prompt, {asked} in the completion). "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            num_prompt_tokens=num_prompt,
            max_tokens=max_seq_len,
        )


def check_input(num_tokens: int, max_seq_len: int, name: str) -> None:
    """Check that an embedding input fits the context. The input may fill the whole context, because
    no output token is generated. `name` is its name in the request.
    """
    if num_tokens > max_seq_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_seq_len} tokens. However, {name} has "
            f"{num_tokens} tokens. Shorten it, or set truncate_prompt_tokens.",
            param=name,
            num_prompt_tokens=num_tokens,
            max_tokens=max_seq_len,
        )
