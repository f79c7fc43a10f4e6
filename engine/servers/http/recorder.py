"""Records requests under `requests.record`.

A recorded request is a file in the storage directory that only its owner can read. It has the token
ids of the prompt and of the answers, the parameters, the seed, and a fingerprint of the model.
"""

import asyncio
import logging
from pathlib import Path

import msgspec

from engine.core.interfaces.request import RecordedRequest
from engine.core.sandbox.private_files import open_private, write_private
from engine.servers.http.request_log import RequestRecord

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 2**20  # a larger request, such as one with many images, is not recorded


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
        await self.finish_writing()

    async def finish_writing(self) -> None:
        """Wait for the files of requests that have ended."""
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
