"""Carries the engine's own figures into the metrics, at a steady pace and at every scrape."""

import asyncio

from engine.backends.base import BackendHolder
from engine.core.observability.metrics import Metrics

INTERVAL_S = 0.5


class EngineWatcher:
    """Looks at the backend; it never asks the engine for anything."""

    def __init__(self, backend: BackendHolder, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._num_restarts = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.observe()
            await asyncio.sleep(INTERVAL_S)

    def observe(self) -> None:
        """Take over what has happened since the last look."""
        backend = self._backend.current
        health, stats = backend.health(), backend.stats()
        for _ in range(health.num_restarts - self._num_restarts):
            self._metrics.engine_restarted(backend.totals_survive_restarts)
        self._num_restarts = health.num_restarts
        if stats is not None:
            self._metrics.observe(stats)
        self._metrics.set_ready(health.ready)
