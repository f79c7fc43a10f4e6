"""Runs one batch to its end. If an earlier process has begun the batch, continues from there.

A line of the input file is one request. Lines run concurrently, as requests with the key that made
the batch: with its current limits, and not at all once it was removed. All batches share a limited
number of slots for lines, of which each tenant gets some. If a line is refused for lack of
capacity, it is retried. Any other answer is the line's result. If the storage is full, the batch
fails. If the storage has another error, this run ends, and the runner tries again later.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.servers.access.auth import Principal
from engine.servers.batches.caller import ABANDONED, Caller, LineAnswer
from engine.servers.batches.lines import Line, Scan, read_body, scan
from engine.servers.batches.results import answered_line, compose
from engine.servers.batches.schema import Batch, LineError
from engine.servers.batches.store import BatchStore
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import FileStore, StorageFullError
from engine.servers.serving.services import Services
from engine.servers.storage.fair_slots import FairSlots

# If the engine was lost this many times during a line (status 503), the line is assumed to be the
# cause and is not retried.
MAX_LOST = 3
CHECK_S = 1.0
READY_CHECK_S = 0.2
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 30.0
_PAGE = 64


@dataclass(frozen=True)
class Bench:
    """The objects that all batch runs share. `slots` limits how many lines run at a time, and
    `reads` how many files are checked at a time.
    """

    services: Services
    store: BatchStore
    files: FileStore
    caller: Caller
    slots: FairSlots
    reads: FairSlots


class BatchRun:
    def __init__(self, bench: Bench, batch_id: str) -> None:
        self._bench = bench
        self._batch_id = batch_id
        self._changed = asyncio.Event()
        self._over = asyncio.Event()  # when set, no line starts and running lines are aborted
        self._failure: EngineError | None = None

    def notice(self) -> None:
        """Tell this run that the batch has changed in the store, for example that it was
        cancelled.
        """
        self._changed.set()

    async def run(self) -> None:
        """Run the batch to its end. Raises an `EngineError` if the storage fails."""
        batch = await self._bench.store.find(self._batch_id)
        if batch.has_ended:
            return
        if batch.status == "validating" and batch.errors is None and not _is_overdue(batch):
            batch = await self._validate(batch)
        if batch.status == "in_progress" and batch.errors is None:
            await self._run_lines(batch)
            batch = await self._bench.store.finalize(batch)
        unfinished = await self._bench.store.pending(batch.id, 0, 1)
        await compose(self._bench.store, self._bench.files, batch, len(unfinished))

    async def _validate(self, batch: Batch) -> Batch:
        if not await self._is_ready():
            return batch
        store, services = self._bench.store, self._bench.services
        path = self._bench.files.path_of(batch.input_file_id)
        max_bytes = services.settings.server.body_limit_mb * 2**20
        principal = services.keys.current(_author(batch))
        if principal is None:
            await store.note_errors(batch, [_keyless()])
            return await store.find(batch.id)
        find_model = partial(services.find_model, principal=principal)
        try:
            async with self._bench.reads.slot(batch.owner):
                found = await asyncio.to_thread(scan, path, batch.endpoint, max_bytes, find_model)
        except OSError:
            found = Scan(errors=[_unreadable()])
        if found.errors:
            await store.note_errors(batch, found.errors)
        elif found.model is not None:
            await store.start(batch, found.model, found.lines)
        return await store.find(batch.id)

    async def _run_lines(self, batch: Batch) -> None:
        watching = asyncio.create_task(self._watch(batch))
        try:
            async with asyncio.TaskGroup() as running:
                await self._feed(batch, running, watching)
        finally:
            watching.cancel()
        if self._failure is not None:
            raise self._failure

    async def _feed(
        self, batch: Batch, running: asyncio.TaskGroup, watching: asyncio.Task[None]
    ) -> None:
        after = 0
        try:
            while page := await self._bench.store.pending(batch.id, after, _PAGE):
                for line in page:
                    if not await self._take_slot(batch.owner, watching):
                        return
                    running.create_task(self._run_line(batch, line))
                after = page[-1].number
        except EngineError as error:
            self._fail(error)

    async def _watch(self, batch: Batch) -> None:
        """Watch the batch. Returns, and stops all lines, when the batch must end early because it
        was cancelled, expired or failed.
        """
        try:
            current = batch
            while self._failure is None and current.status == "in_progress":
                if current.errors is not None or _is_overdue(current):
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):
                        await self._changed.wait()
                self._changed.clear()
                current = await self._bench.store.find(batch.id)
        except EngineError as error:
            self._failure = error
        self._over.set()

    async def _take_slot(self, owner: str, watching: asyncio.Task[None]) -> bool:
        """Wait for a free slot for a line. If the batch must stop before, takes no slot and returns
        False.
        """
        taking = asyncio.create_task(self._bench.slots.acquire(owner))
        try:
            await asyncio.wait({taking, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not taking.done():
                taking.cancel()
        if watching.done() and taking.done():
            self._bench.slots.release(owner)
        return not watching.done()

    async def _run_line(self, batch: Batch, line: Line) -> None:
        try:
            path = self._bench.files.path_of(batch.input_file_id)
            body = await asyncio.to_thread(read_body, path, line)
            answer = await self._answer(batch, body)
            if answer is not None:
                # Parsing large answers with embeddings is slow, so it runs in a thread.
                formatted = asyncio.to_thread(answered_line, batch.endpoint, line.custom_id, answer)
                result, usage = await formatted
                is_good = answer.status == 200
                await self._bench.store.record(batch, line.number, is_good, result, usage)
        except OSError:
            await self._give_up(batch, _unreadable())
        except StorageFullError as error:
            await self._give_up(batch, LineError(code="storage_full", message=error.message))
        except EngineError as error:
            self._fail(error)
        finally:
            self._bench.slots.release(batch.owner)

    async def _give_up(self, batch: Batch, error: LineError) -> None:
        try:
            await self._bench.store.note_errors(batch, [error])
            self.notice()
        except EngineError as failure:
            self._fail(failure)

    def _fail(self, error: EngineError) -> None:
        """End this run with `error`. The runner runs the batch again later."""
        self._failure = error
        self._over.set()
        self.notice()

    async def _answer(self, batch: Batch, body: dict[str, Any]) -> LineAnswer | None:
        """Send a line's request to its endpoint until there is a final answer. Returns None if the
        batch must stop before.
        """
        content = msgspec.json.encode(body)
        pause_s, num_lost = FIRST_PAUSE_S, 0
        while await self._is_ready():
            answer = await self._bench.caller.post(
                batch.endpoint, content, _author(batch), self._over
            )
            if answer.status == 503 and not self._bench.services.lifecycle.is_draining:
                num_lost += 1
            if answer.status not in (429, 503, ABANDONED) or num_lost == MAX_LOST:
                return answer
            # Lines that were refused together should not retry together, so the pause has a random
            # factor.
            asked_s = float(answer.headers.get("retry-after", 0))
            await self._pause(max(asked_s, pause_s) * random.uniform(1.0, 1.5))
            pause_s = min(pause_s * 2, MAX_PAUSE_S)
        return None

    async def _is_ready(self) -> bool:
        """Wait until the server admits requests. Returns False if the batch must stop before."""
        services = self._bench.services
        while services.lifecycle.is_draining or not services.backend.health().ready:
            if self._over.is_set():
                break
            await self._pause(READY_CHECK_S)
        return not self._over.is_set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()


def _author(batch: Batch) -> Principal:
    """The key that made the batch, without what it may do now."""
    return Principal(batch.owner, key=batch.key)


def _is_overdue(batch: Batch) -> bool:
    return unix_now() >= batch.expires_at


def _keyless() -> LineError:
    message = "The API key that made this batch was removed; make it again with a valid one."
    return LineError(code="invalid_api_key", message=message)


def _unreadable() -> LineError:
    return LineError(code="input_file_unreadable", message="The input file can no longer be read.")
