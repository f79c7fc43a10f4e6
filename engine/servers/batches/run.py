"""Runs one batch to its end. If an earlier process has begun the batch, continues from there.

A line of the input file is one request. Lines run concurrently, on behalf of the batch's owner. All
batches share a limited number of slots for lines. If a line is refused for lack of capacity, it is
retried. Any other answer is the line's result. If the storage is full, the batch fails. If the
storage has another error, this run ends, and the runner tries again later.
"""

import asyncio
import contextlib
import random
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.servers.access.auth import Principal
from engine.servers.batches.caller import ABANDONED, Caller, LineAnswer
from engine.servers.batches.lines import Line, Scan, read_body, scan
from engine.servers.batches.schema import Batch, LineError
from engine.servers.batches.store import BatchStore, LineOutcome, LineUsage
from engine.servers.files.draft import Draft
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import FileStore, StorageFullError, StoredFile, new_file_id
from engine.servers.serving.services import Services

_encode = msgspec.json.encode

# Maps the final status of a batch to the error code and message of its lines that were not
# answered.
_UNANSWERED = {
    "expired": ("batch_expired", "The batch expired before this request was answered."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "failed": ("batch_failed", "The batch failed before this request was answered."),
}


def answered_line(custom_id: str, answer: LineAnswer) -> tuple[bytes, LineUsage]:
    """Format the answer to a line as a line of the result file. Also returns the answer's token
    usage.
    """
    body = msgspec.json.decode(answer.body)
    response = {
        "status_code": answer.status,
        "request_id": answer.headers["x-request-id"],
        "body": body,
    }
    return _line(custom_id, response, None), _usage(body)


async def compose(store: BatchStore, files: FileStore, batch: Batch, num_unfinished: int) -> None:
    """End the batch: write the results of its lines to an output file, an error file, or both.
    `num_unfinished` is the number of lines without a result. Idempotent.
    """
    status = batch.ending(num_unfinished)
    output_path, error_id = files.path_of(batch.results_id), new_file_id()
    async with Draft(output_path) as output, Draft(files.path_of(error_id)) as errors:
        after = 0
        while page := await store.outcomes(batch.id, after):
            for outcome in page:
                target = output if outcome.succeeded else errors
                await target.write(_outcome_line(outcome, status) + b"\n")
            after = page[-1].number
        output_file = await _publish(output, batch, batch.results_id, "output")
        error_file = await _publish(errors, batch, error_id, "error")
        await store.end(batch, status, output_file, error_file)
        for draft, file in ((output, output_file), (errors, error_file)):
            if file is not None:
                draft.keep()


async def _publish(draft: Draft, batch: Batch, file_id: str, kind: str) -> StoredFile | None:
    """Publish a result file under its final name. Returns None if the file has no lines."""
    if draft.num_bytes == 0:
        return None
    await draft.publish()
    now = unix_now()
    return StoredFile(
        file_id,
        batch.owner,
        "batch_output",
        f"{batch.id}_{kind}.jsonl",
        draft.num_bytes,
        now,
        now + batch.output_life_s,
    )


def _outcome_line(outcome: LineOutcome, status: str) -> bytes:
    if outcome.result is not None:
        return outcome.result
    code, message = _UNANSWERED[status]
    return _line(outcome.custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    return _encode(
        {
            "id": f"batch_req_{secrets.token_hex(16)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Counts(msgspec.Struct):
    """The usage object of any endpoint. Chats and completions have `prompt_tokens`; the Responses
    API has `input_tokens`.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


def _usage(body: dict[str, Any]) -> LineUsage:
    counts = msgspec.convert(body.get("usage") or {}, _Counts)
    read = counts.prompt_tokens_details or counts.input_tokens_details or _Details()
    written = counts.completion_tokens_details or counts.output_tokens_details or _Details()
    return LineUsage(
        input_tokens=counts.prompt_tokens or counts.input_tokens,
        cached_tokens=read.cached_tokens or 0,
        output_tokens=counts.completion_tokens or counts.output_tokens,
        reasoning_tokens=written.reasoning_tokens or 0,
    )


# The lowest priority (the largest number), so that lines of batches run after all requests of
# clients.
LINE_PRIORITY = 100
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
    """The objects that all batch runs share. `slots` limits how many lines run at a time."""

    services: Services
    store: BatchStore
    files: FileStore
    caller: Caller
    slots: asyncio.Semaphore


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
        try:
            found = await asyncio.to_thread(
                scan, path, batch.endpoint, max_bytes, services.find_model
            )
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
                    if not await self._take_slot(watching):
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

    async def _take_slot(self, watching: asyncio.Task[None]) -> bool:
        """Wait for a free slot for a line. If the batch must stop before, takes no slot and returns
        False.
        """
        taking = asyncio.create_task(self._bench.slots.acquire())
        try:
            await asyncio.wait({taking, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not taking.done():
                taking.cancel()
        if watching.done() and taking.done():
            self._bench.slots.release()
        return not watching.done()

    async def _run_line(self, batch: Batch, line: Line) -> None:
        try:
            path = self._bench.files.path_of(batch.input_file_id)
            body = await asyncio.to_thread(read_body, path, line)
            answer = await self._answer(batch, body)
            if answer is not None:
                # Parsing large answers with embeddings is slow, so it runs in a thread.
                result, usage = await asyncio.to_thread(answered_line, line.custom_id, answer)
                is_good = answer.status == 200
                await self._bench.store.record(batch, line.number, is_good, result, usage)
        except OSError:
            await self._give_up(batch, _unreadable())
        except StorageFullError as error:
            await self._give_up(batch, LineError(code="storage_full", message=error.message))
        except EngineError as error:
            self._fail(error)
        finally:
            self._bench.slots.release()

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
        if body.get("priority") is None:
            body["priority"] = LINE_PRIORITY
        content = msgspec.json.encode(body)
        pause_s, num_lost = FIRST_PAUSE_S, 0
        while await self._is_ready():
            answer = await self._bench.caller.post(
                batch.endpoint, content, Principal(batch.owner), self._over
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


def _is_overdue(batch: Batch) -> bool:
    return unix_now() >= batch.expires_at


def _unreadable() -> LineError:
    return LineError(code="input_file_unreadable", message="The input file can no longer be read.")
