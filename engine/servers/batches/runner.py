"""Runs batches, if this server holds a file lock.

Servers with the same storage directory and the same models form a pool. In each pool, only the
server that holds the pool's lock runs batches. The other servers accept and show batches.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Sequence

from engine.core.errors import EngineError
from engine.core.interfaces.backend import ModelCard
from engine.servers.batches.run import BatchRun, Bench
from engine.servers.batches.schema import LineError
from engine.servers.files.expiry import unix_now
from engine.servers.serving.services import Services
from engine.servers.storage.fair_slots import FairSlots
from engine.servers.storage.job_queue import JobQueue

logger = logging.getLogger(__name__)

MAX_RUNNING_LINES = 16
POLL_S = 1.0
SWEEP_S = 600.0
RETRY_S = 10.0


def pool_of(cards: Sequence[ModelCard]) -> str:
    """The id of a server's pool. It is equal for servers with the same models. Adapters don't
    count: they come and go while batches run.
    """
    names = "\n".join(sorted(card.id for card in cards if card.parent is None))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def line_slots(services: Services) -> FairSlots:
    """A slot for each batch line that may run at a time. There are at most half as many as the
    server admits requests.
    """
    half = services.settings.server.max_concurrent_requests // 2
    return FairSlots(max(1, min(MAX_RUNNING_LINES, half)))


class BatchRunner(JobQueue):
    """Runs the batches of this server's pool, all at the same time."""

    def __init__(self, bench: Bench) -> None:
        super().__init__("batches", bench.store.database, POLL_S, POLL_S)
        self._bench = bench
        self._runs: dict[str, BatchRun] = {}
        self._swept_at: float | None = None

    def notice(self, batch_id: str) -> None:
        """Tell the runner that a batch was created or cancelled on this server."""
        self.wake()
        if batch_id in self._runs:
            self._runs[batch_id].notice()

    async def look(self) -> None:
        cards = self._bench.services.backend.models()
        if cards and self.holds(_lock_of(pool_of(cards))):
            await self._begin_runs(pool_of(cards))
        if self._swept_at is None or time.monotonic() - self._swept_at >= SWEEP_S:
            await self._sweep()
            self._swept_at = time.monotonic()

    async def _begin_runs(self, pool: str) -> None:
        for batch in await self._bench.store.open_batches():
            if batch.pool == pool and batch.id not in self._runs:
                run = self._runs[batch.id] = BatchRun(self._bench, batch.id)
                self.begin(self._run_batch(batch.id, run))

    async def _run_batch(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
        except EngineError as error:
            logger.warning("batch %s goes on later: %s", batch_id, error)
            await asyncio.sleep(RETRY_S)
        except Exception:
            # The exception is a bug. The batch is ended, so that it is not retried forever.
            logger.exception("batch %s failed unexpectedly", batch_id)
            await self._abandon(batch_id)
        finally:
            self._runs.pop(batch_id, None)

    async def _abandon(self, batch_id: str) -> None:
        store = self._bench.store
        with contextlib.suppress(EngineError):
            batch = await store.find(batch_id)
            message = "The server failed to run this batch. Its log says why."
            await store.note_errors(batch, [LineError(code="internal_error", message=message)])
            await store.end(batch, "failed", None, None)

    async def _sweep(self) -> None:
        """Delete expired batches and files. Also end expired batches of pools in which no server
        runs any more.
        """
        settings = self._bench.services.settings.storage
        for batch in await self._bench.store.open_batches():
            if batch.id not in self._runs and unix_now() >= batch.expires_at:
                lock = self.lock(_lock_of(batch.pool))
                was_held = lock.is_held
                try:
                    if lock.acquire():
                        await self._run_batch(batch.id, BatchRun(self._bench, batch.id))
                finally:
                    if not was_held:
                        lock.release()
        await self._bench.store.sweep(settings.file_ttl_s)
        await self._bench.files.sweep()


def _lock_of(pool: str) -> str:
    return f"batches-{pool}"
