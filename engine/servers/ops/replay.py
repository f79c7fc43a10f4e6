"""Records requests under `requests.record`, and runs a recorded one again.

A recorded request is a file in the storage directory that only its owner can read. It has the token
ids of the prompt and of the answers, the parameters, the seed, and a fingerprint of the model.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import ConflictError, NotFoundError
from engine.core.interfaces.notes import RecordedRequest
from engine.core.sandbox.private_files import open_private, write_private
from engine.servers.http.request_log import RequestRecord
from engine.servers.ops.admin import who_is
from engine.servers.ops.admin_control import EmptyBody
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services, json_response

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 2**20  # a larger request, such as one with many images, is not recorded
HOW_TO_RECORD = (
    "Requests are not recorded. Set requests.record = true, or"
    " LLM_ENGINE_REQUESTS__RECORD=true, and start the server again."
)


class RecordedFile(msgspec.Struct):
    model: str
    requests: list[RecordedRequest]


class Recorder:
    """Writes recorded requests to files, at most `max_files` of them. A component of the server."""

    def __init__(self, folder: Path, max_files: int) -> None:
        self._folder = folder
        self._max_files = max_files
        self._names: list[str] = []  # of all files, oldest first
        self._writing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = sorted(self._folder.glob("*.msgpack"), key=lambda each: each.stat().st_mtime)
        self._names = [each.name for each in files]

    async def stop(self) -> None:
        await asyncio.gather(*self._writing, return_exceptions=True)

    def keep(self, record: RequestRecord) -> None:
        """Write what was recorded of a request that has ended. Does not wait for the disk."""
        found = [each for each in record.notes.recorded or () if each.token_ids]
        record.notes.recorded = None
        if found and record.completion_id is not None:
            made = RecordedFile(record.model, found)
            task = asyncio.create_task(self._write(f"{record.completion_id}.msgpack", made))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, name: str, recorded: RecordedFile) -> None:
        content = msgspec.msgpack.encode(recorded)
        if len(content) > MAX_FILE_BYTES:
            logger.warning("a request of %d bytes is too large to be recorded", len(content))
            return
        try:
            await asyncio.to_thread(write_private, self._folder / name, content)
            self._names.append(name)
            while len(self._names) > self._max_files:
                (self._folder / self._names.pop(0)).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a request could not be recorded: %s", error)

    def read(self, completion_id: str) -> RecordedFile | None:
        name = f"{completion_id}.msgpack"
        if name not in self._names:
            return None
        try:
            with open_private(self._folder / name) as file:
                return msgspec.msgpack.decode(file.read(), type=RecordedFile)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("a recorded request can't be read: %s", error)
            return None


def add_replay_routes(app: FastAPI, services: Services) -> None:
    audit = audit_of(services)

    @app.post("/v1/admin/requests/{request_id}/replay")
    async def replay(request: Request, request_id: str) -> Response:
        await services.read(request, EmptyBody)
        recorder = services.history.recorder
        if recorder is None:
            raise ConflictError(HOW_TO_RECORD)
        kept = services.history.find(request_id, None)
        completion_id = request_id if kept is None else kept.completion_id or request_id
        recorded = await asyncio.to_thread(recorder.read, completion_id)
        if recorded is None:
            raise NotFoundError(
                "This request was not recorded: it is too old, or its backend is not our own.",
                param="request_id",
            )
        async with audit.change(who_is(request), "replay", completion_id[:64]):
            results = [await _replayed(services, recorded.model, r) for r in recorded.requests]
        choices = [choice for result in results for choice in result["choices"]]
        return json_response(
            {
                "id": completion_id,
                "model": recorded.model,
                "same": all(each["differs_at"] is None for each in choices),
                "same_fingerprint": all(each["same_fingerprint"] for each in results),
                "choices": choices,
            }
        )


async def _replayed(services: Services, model: str, recorded: RecordedRequest) -> dict[str, Any]:
    # Answers that a stop string or their client ended are compared up to this end.
    longest = max(map(len, recorded.token_ids.values()))
    params = replace(recorded.request.params, max_tokens=max(longest, 1))
    request = replace(recorded.request, params=params, timeout_s=None, queue_timeout_s=None)
    again = await services.backend.replay(request, model=model)
    return {
        "same_fingerprint": again.fingerprint == recorded.fingerprint,
        "choices": [
            {
                "choice": choice,
                "tokens": len(tokens),
                "differs_at": first_difference(tokens, again.token_ids.get(choice, [])),
            }
            for choice, tokens in sorted(recorded.token_ids.items())
        ],
    }


def first_difference(recorded: Sequence[int], again: Sequence[int]) -> int | None:
    """Index of the first recorded token that differs or is missing. None: all are the same."""
    if list(again[: len(recorded)]) == list(recorded):
        return None
    pairs = enumerate(zip(recorded, again, strict=False))
    return next((index for index, (a, b) in pairs if a != b), len(again))
