"""An engine link over a client that does exactly what the test says: no process, no waiting."""

import asyncio

import pytest

from engine.core.errors import (
    UnavailableError,
)
from engine.core.interfaces.request import (
    GenerateRequest,
    Ready,
    SamplingParams,
)
from engine.core.sandbox.liveness import Vitals
from engine.frontend import engine_link as link_module
from engine.frontend.engine_link import EngineLink

READY = Ready(256, 64, 16, 8, "float32", "cpu", 0.1)
HEALTHY = Vitals(step_age_s=None, step_timeout_s=10.0, silent_s=0.1)


class ScriptedClient:
    """Sends nowhere, and shows the vitals that it was given, one for each look."""

    pid = 1

    def __init__(self, on_message, on_exit) -> None:
        self.on_message, self.on_exit = on_message, on_exit
        self.sent: list = []
        self.looks: list[Vitals | None] = []
        self.looked = asyncio.Event()  # all of them
        self.num_woken = self.num_killed = 0
        self.is_gone = self.is_stopped = self.is_started = False

    async def start(self) -> None:
        self.is_started = True

    def send(self, message) -> None:
        if self.is_gone:
            raise UnavailableError("gone")
        self.sent.append(message)

    def vitals(self) -> Vitals | None:
        if self.looks:
            return self.looks.pop(0)
        self.looked.set()
        return HEALTHY

    def show(self, looks: list[Vitals | None]) -> None:
        self.looks = list(looks)
        self.looked.clear()

    def wake(self) -> None:
        self.num_woken += 1

    async def kill(self) -> bool:
        self.num_killed += 1
        return True

    async def stop(self) -> None:
        self.is_stopped = True


class Delays:
    """A restart policy that says what the test wants, and remembers what it was asked."""

    def __init__(self, *delays: float | None) -> None:
        self._delays = list(delays)

    def delay_after_death(self) -> float | None:
        return self._delays.pop(0)


class Receiver:
    def __init__(self) -> None:
        self.items: list = []

    def deliver(self, *items) -> None:
        self.items.extend(items)


class Bench:
    """A link, and every client that it made."""

    def __init__(
        self,
        *delays: float | None,
        cool_down_s: float = 60.0,
        max_revivals: int = 0,
        move=lambda opened: False,
    ) -> None:
        self.clients: list[ScriptedClient] = []
        self.link = EngineLink(self._make, Delays(*delays), cool_down_s, max_revivals, move)

    def _make(self, on_message, on_exit) -> ScriptedClient:
        self.clients.append(ScriptedClient(on_message, on_exit))
        return self.clients[-1]

    @property
    def client(self) -> ScriptedClient:
        return self.clients[-1]

    async def start(self) -> None:
        starting = asyncio.create_task(self.link.start())
        await asyncio.sleep(0)
        self.client.on_message(READY)
        assert await starting == READY and self.client.is_started

    def submit(self, name: str = "r", **fields) -> Receiver:
        receiver = Receiver()
        fields = {"params": SamplingParams()} | fields
        self.link.submit(GenerateRequest(request_id=name, prompt=(1,), **fields), receiver)
        return receiver

    async def replace_engine(self) -> list[GenerateRequest]:
        """Let the engine die and a new one load. Returns the requests that the new one gets."""
        self.client.on_exit(-9)
        await settle()
        self.client.on_message(READY)
        return self.client.sent


def record_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every pause of the link from now on, none of which lasts."""
    made: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        made.append(seconds)
        await sleep(0)

    monkeypatch.setattr(link_module.asyncio, "sleep", pause)
    return made


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
