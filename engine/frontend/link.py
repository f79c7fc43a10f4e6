"""What a backend needs from the engine or the engines behind it."""

from collections.abc import Callable
from typing import Protocol

from engine.core.interfaces.request import ControlReply, GenerateRequest, Ready
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.frontend.request_recovery import Engine, OpenRequest, Receiver


class Link(Engine, Protocol):
    """Takes requests. `EngineLink` sends them to one engine, and a pool to one of several."""

    # Called with each open request of an engine that died. Returns whether another engine took it.
    move: Callable[[OpenRequest], bool]

    async def start(self) -> Ready | None:
        """Start the engine. Returns None if engines will come later."""
        ...

    async def stop(self) -> None: ...

    def submit(self, request: GenerateRequest, receiver: Receiver) -> None: ...

    def take_over(self, opened: OpenRequest) -> None: ...

    def release(self) -> list[OpenRequest]: ...

    def hand_over(self, successor: "Link") -> int: ...

    async def flush_cache(self) -> ControlReply: ...

    async def set_log_level(self, level: str) -> ControlReply: ...

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        """What each engine is doing now, by the engine's name. An engine's own name is empty."""
        ...

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        """The names of the engines that a request was sent to, if there are several engines."""
        ...

    @property
    def ready(self) -> Ready | None: ...

    @property
    def last_ready(self) -> Ready | None: ...

    @property
    def stats(self) -> EngineStats | None: ...

    @property
    def num_open(self) -> int: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_revived(self) -> int: ...

    @property
    def survives(self) -> bool: ...

    @property
    def detail(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def step_age_s(self) -> float | None: ...

    @property
    def trouble(self) -> str | None: ...

    @property
    def is_overdue(self) -> bool: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def accepts(self) -> bool: ...
