"""The audit log: one JSON line for every administrative change, with its author and time.

The file is in the storage directory, and only the user that runs the server can read it. Lines are
only appended. When the file reaches a size limit, it is renamed to `audit.jsonl.1`, which replaces
an older file of that name. The file has no secrets: it has the names of keys, not the keys.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.sandbox.private_files import append_whole

logger = logging.getLogger("engine.audit")

FILE_NAME = "audit.jsonl"
MAX_BYTES = 16 * 2**20


class AuditLog:
    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def change(
        self, who: str, action: str, target: str = "", **detail: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """A context in which a change is made. When the context ends, the change is logged, even if
        it failed. Entries that are added to the yielded dictionary become part of the log line.
        """
        result = "ok"
        try:
            yield detail
        except EngineError as error:
            result = error.error_code
            raise
        except BaseException as error:
            result = type(error).__name__
            raise
        finally:
            await self.write(who, action, target, result, detail)

    async def write(
        self, who: str, action: str, target: str, result: str, detail: dict[str, Any]
    ) -> None:
        """Append a line to the file. A disk error is only logged, because the change has already
        been made.
        """
        entry = {
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": who,
            "action": action,
            "target": target,
            "result": result,
            "detail": detail,
        }
        logger.info("%s", action, extra={"who": who, "target": target, "result": result})
        line = msgspec.json.encode(entry) + b"\n"
        async with self._lock:
            try:
                await asyncio.to_thread(self._append, line)
            except OSError as error:
                logger.error("the audit log %s can't be written: %s", self.path, error)

    async def newest(self, count: int) -> list[dict[str, Any]]:
        """The newest `count` entries of the current file, newest first."""
        return await asyncio.to_thread(self._read, count)

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self.path, flags, 0o600)
        try:
            append_whole(handle, line)
            is_full = os.fstat(handle).st_size >= MAX_BYTES
        finally:
            os.close(handle)
        if is_full:
            os.replace(self.path, self.path.with_name(FILE_NAME + ".1"))

    def _read(self, count: int) -> list[dict[str, Any]]:
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [entry for line in reversed(lines[-count:]) if (entry := _decoded(line))]


def _decoded(line: bytes) -> dict[str, Any] | None:
    """The parsed log line. None if it is invalid JSON, because a crash cut it off."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
