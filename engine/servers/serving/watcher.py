"""Copies the engine's counters into the server's metrics, periodically and whenever the metrics are
read.
"""

import asyncio

from engine.backends.base import BackendHolder
from engine.core.observability.metrics import Metrics

INTERVAL_S = 0.5


class EngineWatcher:
    """Updates the metrics from statistics that the backend already has. It sends no request to the
    engine.
    """

    def __init__(self, backend: BackendHolder, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._num_restarts = self._num_revived = 0

    async def run(self) -> None:
        """Call `observe` periodically until cancelled."""
        while True:
            self.observe()
            await asyncio.sleep(INTERVAL_S)

    def observe(self) -> None:
        """Update the metrics from the backend's current statistics."""
        backend = self._backend.current
        health, stats = backend.health(), backend.stats()
        for _ in range(health.num_restarts - self._num_restarts):
            self._metrics.engine_restarted(backend.totals_survive_restarts)
        self._num_restarts = health.num_restarts
        self._metrics.requests_revived(max(0, health.num_revived - self._num_revived))
        self._num_revived = health.num_revived
        if stats is not None:
            self._metrics.observe(stats)
        self._metrics.set_ready(health.ready)
