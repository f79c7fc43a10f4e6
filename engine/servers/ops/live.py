"""`/v1/admin/live`: what the server and its engines are doing, a few times a second, as SSE.

One task takes snapshots while somebody watches, and all watchers get the same bytes. Without a
watcher, nothing runs. The first event of a stream, `past`, has the last minutes, which the server
always keeps. `/v1/admin/snapshot` answers with one snapshot.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import msgspec
from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse

from engine.core.errors import RateLimitError
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.routing.report import describe_routes
from engine.routing.router import Router
from engine.servers.access.auth import Principal
from engine.servers.ops.admin import only_backend
from engine.servers.serving.services import Services, json_response

INTERVAL_S = 0.25
RATE_S = 1.0  # seconds over which rates are computed
MAX_WATCHERS = 32
MAX_DECISIONS = 12
# Counters whose growth per second is part of a snapshot.
RATES = ("generated_tokens", "prompt_tokens", "cached_tokens", "num_steps", "num_preemptions")


def add_live_routes(app: FastAPI, services: Services) -> None:
    view = LiveView(services)

    @app.get("/v1/admin/snapshot")
    async def snapshot() -> Response:
        return json_response(await view.take())

    @app.get("/v1/admin/live")
    async def live() -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(view.watch(), headers=headers, media_type="text/event-stream")


class Watcher:
    """Somebody who watches the server."""


class LiveView:
    """Takes snapshots for all who watch the server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._frame = b""
        self._changed = asyncio.Event()  # replaced with each frame
        self._taking: asyncio.Task[None] | None = None
        # From the request on, and not only from the first frame on. Weak: a stream whose client has
        # gone before the first frame is never read.
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._seen: deque[tuple[float, EngineStats]] = deque()  # of the last RATE_S seconds

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def watch(self) -> AsyncGenerator[bytes, None]:
        """The frames from now on. A slow watcher skips frames."""
        if self.num_watchers >= MAX_WATCHERS:
            raise RateLimitError(
                f"{MAX_WATCHERS} clients watch the server already. Close one.", retry_after=None
            )
        watcher = Watcher()
        self._watchers.add(watcher)
        return self._frames(watcher)

    async def _frames(self, watcher: Watcher) -> AsyncGenerator[bytes, None]:
        try:
            yield b"event: past\ndata: " + msgspec.json.encode(self._past()) + b"\n\n"
            if self._taking is None or self._taking.done():
                self._taking = asyncio.create_task(self._take_all())
                # If a snapshot fails, the streams end, and their clients connect again.
                self._taking.add_done_callback(lambda _: self._show(b""))
            taking = self._taking
            while not taking.done():
                changed = self._changed
                if self._frame:
                    yield self._frame
                await changed.wait()
        finally:
            self._watchers.discard(watcher)

    async def _take_all(self) -> None:
        while self.num_watchers and not self._services.lifecycle.is_ending:
            began = time.monotonic()
            frame = msgspec.json.encode(await self.take())
            self._show(b"data: " + frame + b"\n\n")
            await asyncio.sleep(max(INTERVAL_S - (time.monotonic() - began), INTERVAL_S / 5))

    def _show(self, frame: bytes) -> None:
        self._frame = frame
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def take(self) -> dict[str, Any]:
        services = self._services
        backend, lifecycle = services.backend, services.lifecycle
        engines = await backend.snapshots()
        stats, health = backend.stats(), backend.health()
        tenants = {each.tenant for engine in engines.values() for each in engine.tenants}
        now = time.monotonic()
        routed = _routes(services)
        return {
            "at": now,
            "uptime_s": round(now - lifecycle.started, 3),
            "ready": health.ready,
            "detail": health.detail,
            "in_flight": lifecycle.num_admitted,
            "total_requests": lifecycle.total_requests,
            "stats": None if stats is None else _named(stats),
            "rates": self._update_rates(now, stats),
            "engines": [_engine(name, each, now) for name, each in engines.items()],
            "tenants": {name: self._label(name) for name in tenants},
            "models": routed["models"],
            "decisions": routed["decisions"],
        }

    def _update_rates(self, now: float, stats: EngineStats | None) -> dict[str, float]:
        """The growth of counters per second. Empty in the first snapshot after a pause."""
        seen = self._seen
        if stats is None:
            seen.clear()
            return {}
        seen.append((now, stats))
        while len(seen) > 2 and now - seen[1][0] >= RATE_S or now - seen[0][0] > 5 * RATE_S:
            seen.popleft()
        if len(seen) < 2:
            return {}
        then, before = seen[0]
        return _grown(then, before, now, stats)

    def _past(self) -> list[dict[str, Any]]:
        """Points of the last minutes: a time, rates since the point before, and requests."""
        return [
            {
                "at": now,
                "rates": _grown(then, before, now, stats),
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
            }
            for (then, before), (now, stats) in pairwise(self._services.watcher.past)
        ]

    def _label(self, tenant: str) -> str:
        """The tenant's name in the keys file, or the start of the hash that identifies it."""
        return self._services.keys.label(Principal(tenant)) or tenant[:8] or "anyone"


def _grown(then: float, before: EngineStats, now: float, stats: EngineStats) -> dict[str, float]:
    grown = ((name, getattr(stats, name) - getattr(before, name)) for name in RATES)
    # After a restart of the engine, its counters begin at 0 again.
    return {name: round(max(count, 0) / (now - then), 2) for name, count in grown}


def _routes(services: Services) -> dict[str, Any]:
    backend = services.backend.unwrapped
    if not isinstance(backend, Router):
        return {"models": only_backend(services), "decisions": []}
    described = describe_routes(backend)
    shown = ("request_id", "model", "policy", "chosen", "why", "attempts", "waited_s", "at")
    newest = described["decisions"][:MAX_DECISIONS]
    described["decisions"] = [{name: each[name] for name in shown} for each in newest]
    return described


def _named(stats: EngineStats) -> dict[str, Any]:
    names = [each for each in EngineStats.__struct_fields__ if each not in ("steps", "tiers")]
    fields: dict[str, Any] = {name: getattr(stats, name) for name in names}
    return fields | {"tiers": [msgspec.structs.asdict(each) for each in stats.tiers]}


def _engine(name: str, snapshot: EngineSnapshot, now: float) -> dict[str, Any]:
    """A snapshot of an engine with names for all fields. Times of steps are seconds before now."""
    return {
        "name": name,
        "blocked_by": snapshot.blocked_by,
        "max_slots": snapshot.max_slots,
        "running": [msgspec.structs.asdict(each) for each in snapshot.running],
        "waiting": [msgspec.structs.asdict(each) for each in snapshot.waiting],
        "steps": [
            msgspec.structs.asdict(each) | {"ended_at": round(each.ended_at - now, 4)}
            for each in snapshot.steps
        ],
        "tree": {
            "num_nodes": snapshot.tree.num_nodes,
            "num_blocks": snapshot.tree.num_blocks,
            "num_shared": snapshot.tree.num_shared,
            "nodes": [msgspec.structs.asdict(each) for each in snapshot.tree.nodes],
        },
        "tenants": [msgspec.structs.asdict(each) for each in snapshot.tenants],
        "kernels": {each.name: each.seconds for each in snapshot.kernels},
    }
