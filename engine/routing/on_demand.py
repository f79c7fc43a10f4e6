"""Models that are unloaded when idle and loaded again on the next request.

`OnDemand` wraps a backend. While the backend is unloaded it still counts as ready, and the next
request loads it. `Residency` decides which models to unload.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from engine.backends.base import (
    EventSink,
    GeneratedFeed,
    InferenceBackend,
    InterruptedRequest,
    ReplayedTokens,
    Tokenizing,
    close_events,
    push_events,
)
from engine.backends.custom.base_custom import CustomBackend
from engine.core.errors import ConflictError, EngineError, UnavailableError
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
from engine.routing.adapter_routes import restore_adapters
from engine.routing.residency import Residency, own_bytes
from engine.routing.swapping import ReplacedBackends, Swapped

log = logging.getLogger(__name__)


class OnDemand(InferenceBackend):
    """A backend that can be unloaded. `make` returns a new backend each time it is loaded. `loaded`
    is a backend that already runs, if there is one.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], InferenceBackend],
        residency: Residency,
        *,
        expected_bytes: int = 0,
        loaded: InferenceBackend | None = None,
    ) -> None:
        self.name = name
        self.on_unload: Callable[[], None] = lambda: None
        self.num_open = 0
        self.last_used = time.monotonic()
        self.is_leaving = False
        # Seconds without a request after which this model is unloaded. They replace the residency's
        # limit until then.
        self.keep_s: float | None = None
        self._make = make
        self._residency = residency
        # Bytes of memory that the model will need when it is loaded: an estimate at first, and
        # measured when the model is unloaded.
        self.expected_bytes = expected_bytes
        self._inner = loaded
        self._starting: InferenceBackend | None = None
        self._cards = [] if loaded is None else loaded.models()
        # The adapters of the backend that was unloaded last. The next one gets them back.
        self._adapters: Mapping[str, str] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._replaced = ReplacedBackends()
        self._failure = ""
        self._log_level: str | None = None  # set if it differs from the backend's default
        self._became_idle = asyncio.Event()
        self._is_stopped = False
        if loaded is not None:
            loaded.on_interrupted = self._interrupted
        residency.members.append(self)

    @property
    def is_loaded(self) -> bool:
        return self._inner is not None

    @property
    def loaded(self) -> InferenceBackend | None:
        return self._inner

    @property
    def is_busy(self) -> bool:
        """Whether the backend has open requests. Requests that were submitted before this object
        wrapped the backend count too.
        """
        if self.num_open or self._inner is None:
            return self.num_open > 0
        stats = self._inner.stats()
        return stats is not None and stats.num_running + stats.num_waiting > 0

    @property
    def idle_s(self) -> float:
        """Seconds since the last request began or ended."""
        return time.monotonic() - self.last_used

    @property
    def seconds_left(self) -> float:
        """Seconds until the model has been idle for too long. Infinite if it may stay loaded."""
        limit = self._residency.idle_s if self.keep_s is None else self.keep_s
        return math.inf if limit is None else limit - self.idle_s

    @property
    def state(self) -> str:
        if self.is_leaving:
            return "unloading"
        if self._loading is not None:
            return "loading"
        if self._inner is None:
            return "unloaded"
        return "loaded" if self._inner.health().ready else "down"

    async def start(self) -> str:
        await self.load()
        return f"on-demand://{self.name}"

    async def stop(self) -> None:
        self._is_stopped = True
        loading = self._loading
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        await self._replaced.stop()
        if self._inner is not None:
            await self._inner.stop()

    async def load(self) -> None:
        """Load the model and return when it is ready. If loading fails, every waiting caller gets
        the same error.
        """
        if self._inner is not None:
            return
        if self._is_stopped:
            raise UnavailableError("The server is shutting down.")
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
            self._loading.add_done_callback(_retrieve)
        await asyncio.shield(self._loading)

    async def unload(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for running requests, abort those that are left, and free the
        memory. Returns False if the model was not loaded.
        """
        if self._inner is None or self.is_leaving:
            return False
        self.is_leaving = True
        self.keep_s = None
        try:
            await self._idle_within(wait_s)
            self.expected_bytes = self.resident_bytes() or self.expected_bytes
            backend, self._inner = self._inner, None
            self._adapters = dict(backend.adapters)
            await backend.stop()
        finally:
            self.is_leaving = False
        self.on_unload()
        return True

    async def swap(self, remake: Callable[[CustomBackend], CustomBackend]) -> Swapped:
        """Replace the backend by the one that `remake` makes of it. Requests continue in the new
        one. If they would not have the same result there, they finish in the old one, which ends
        when it has no requests left. If the new one can't start, nothing changes.
        """
        async with self.use() as old:
            if not isinstance(old, CustomBackend):
                raise ConflictError(f"{self.name} can't be swapped: it is no engine of our own.")
            new = remake(old)
            async with self._residency.room_for(self):
                await self._start(new)
        self._inner, self._cards = new, new.models()
        self._make = lambda: new.remade(None, {})
        self.on_unload()
        return self._replaced.hand_over(old, new)

    async def _start(self, backend: InferenceBackend) -> None:
        backend.on_interrupted = self._interrupted
        if self._log_level is not None:
            await backend.set_log_level(self._log_level)
        try:
            await backend.start()
        except BaseException:
            await backend.stop()
            raise

    def resident_bytes(self) -> int:
        """Memory of the processes that run the model, without this process."""
        return sum(map(own_bytes, (*self._replaced, self._inner)))

    def health(self) -> Health:
        if self.is_leaving:
            return Health(ready=False, detail="It is being unloaded.")
        backend = self._inner or self._starting
        if self._inner is not None or (backend is not None and not self._cards):
            assert backend is not None
            return backend.health()
        if not self._cards:
            return Health(ready=False, detail=self._failure or "It is waiting to be loaded.")
        return Health(ready=True, detail="It is unloaded; the next request loads it.", loaded=False)

    @property
    def is_ready(self) -> bool:
        if self._inner is None or self.is_leaving:
            return self.health().ready
        return self._inner.is_ready

    def take_over(self, interrupted: InterruptedRequest) -> bool:
        return (
            self._inner is not None and not self.is_leaving and self._inner.take_over(interrupted)
        )

    def _interrupted(self, interrupted: InterruptedRequest) -> bool:
        return self.on_interrupted is not None and self.on_interrupted(interrupted)

    @property
    def is_accelerated(self) -> bool:
        return self._inner is not None and self._inner.is_accelerated

    def memory_bytes(self) -> int:
        return 0 if self._inner is None else self._inner.memory_bytes()

    def models(self) -> list[ModelCard]:
        if self._inner is not None:
            self._cards = self._inner.models() or self._cards
        return self._cards

    def stats(self) -> EngineStats | None:
        return None if self._inner is None else self._inner.stats()

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        return _Answer(self, lambda backend: backend.chat(request))

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        return _Answer(self, lambda backend: backend.complete(request))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        async with self.use() as backend:
            return await backend.embed(request)

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        async with self.use() as backend:
            return await backend.tokenize(content, model=model, **how)

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        async with self.use() as backend:
            return await backend.detokenize(token_ids, model=model)

    async def token_bytes(self, token_ids: tuple[int, ...], *, model: str = "") -> list[bytes]:
        async with self.use() as backend:
            return await backend.token_bytes(token_ids, model=model)

    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo | None:
        async with self.use() as backend:
            return await backend.tokenizer_info(model=model)

    async def sites(self, *, model: str = "") -> list[dict[str, Any]]:
        async with self.use() as backend:
            return await backend.sites(model=model)

    async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
        return () if self._inner is None else await self._inner.flush_prefixes(model=model)

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        return {} if self._inner is None else await self._inner.snapshots()

    async def replay(self, request: GenerateRequest, *, model: str = "") -> ReplayedTokens:
        async with self.use() as backend:
            return await backend.replay(request, model=model)

    def files_of(self, model: str) -> Path | None:
        return None if self._inner is None else self._inner.files_of(model)

    @property
    def adapters(self) -> Mapping[str, str]:
        if self._inner is not None:
            return self._inner.adapters
        return self._adapters or {}

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        async with self.use() as backend:
            await backend.load_adapter(name, path, base=base, replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        if self._inner is None and name in self.adapters:
            self._adapters = {each: path for each, path in self.adapters.items() if each != name}
            return
        async with self.use() as backend:
            await backend.unload_adapter(name)

    async def set_log_level(self, level: str) -> tuple[str, ...]:
        self._log_level = level
        return () if self._inner is None else await self._inner.set_log_level(level)

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncGenerator[InferenceBackend, None]:
        """Yields the backend, and loads it first if needed. `Residency` does not unload it inside
        this context.
        """
        if self.is_leaving:
            raise UnavailableError(f"{self.name} is being unloaded. Retry later.", retry_after=1.0)
        self.num_open += 1  # so that `Residency` does not unload it
        self.last_used = time.monotonic()
        try:
            await self.load()
            assert self._inner is not None
            yield self._inner
        finally:
            self.num_open -= 1
            self.last_used = time.monotonic()
            if not self.num_open:
                self._became_idle.set()

    async def _load(self) -> None:
        try:
            async with self._residency.room_for(self):
                began = time.monotonic()
                backend = self._starting = self._make()
                await self._start(backend)
                if self._adapters is not None:
                    await restore_adapters(backend, self._adapters)
                    self._adapters = None
                self._inner, self._cards = backend, backend.models()
                self.last_used = time.monotonic()
                log.info("%s is loaded after %.1f s", self.name, self.last_used - began)
        except EngineError as error:
            self._failure = error.message
            raise
        finally:
            self._loading = self._starting = None

    async def _idle_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.is_busy and (left := deadline - time.monotonic()) > 0:
            self._became_idle.clear()
            with contextlib.suppress(TimeoutError):
                # This event is not set by requests that were submitted before the backend was
                # wrapped. So check again after half a second at the latest.
                await asyncio.wait_for(self._became_idle.wait(), min(left, 0.5))


class _Answer(GeneratedFeed):
    """The events of a request. Reading the first event loads the model if it is not loaded."""

    def __init__(
        self, owner: OnDemand, begin: Callable[[InferenceBackend], AsyncIterator[Event]]
    ) -> None:
        super().__init__()
        self._owner = owner
        self._begin = begin

    async def feed(self, sink: EventSink) -> None:
        async with self._owner.use() as backend:
            await push_events(self._begin(backend), sink)

    async def _read(self) -> AsyncGenerator[Event, None]:
        async with self._owner.use() as backend:
            source = self._begin(backend)
            try:
                async for event in source:
                    yield event
            finally:
                await close_events(source)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Read the task's error. Otherwise asyncio would log it as never retrieved if all callers that
    waited for it were cancelled.
    """
    if not task.cancelled():
        task.exception()
