"""Logs requests and answers to a private file, one JSON object per line.

The plugin writes in its own thread and its queue is bounded, so no request waits for it. With
`record = "digests"` the file has hashes instead of texts. Hashes show which texts are equal, but
not what they say.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.core.errors import ConfigError
from engine.core.interfaces.plugin import InferencePlugin, PluginRequest, PluginResponse
from engine.core.sandbox.private_files import ForeignFileError, append_whole


class AuditOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    record: Literal["digests", "texts"] = "digests"
    max_size_mb: float = 64.0
    max_files: int = 5  # max number of log files, including the current one


class RequestAudit(InferencePlugin):
    """Records every request and answer, as digests or as texts."""

    name = "audit_log"
    version = "1.0"

    def __init__(self) -> None:
        self._file: PrivateLog | None = None
        self._keeps_texts = False

    async def initialize(self, config: Mapping[str, Any]) -> None:
        try:
            options = msgspec.convert(dict(config), AuditOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        if not 0.001 <= options.max_size_mb <= 2**20 or not 1 <= options.max_files <= 1000:
            raise ConfigError("max_size_mb must be 0.001 to 1048576, and max_files 1 to 1000")
        self._keeps_texts = options.record == "texts"
        path = Path(options.path).expanduser()
        try:
            self._file = PrivateLog(path, int(options.max_size_mb * 2**20), options.max_files)
        except OSError as error:
            raise ConfigError(f"path: {path} can't be written: {error}") from None

    async def post_inference(self, response: PluginResponse) -> PluginResponse | None:
        assert self._file is not None
        entry = self.entry(response)
        entry["time"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        # Characters outside ASCII are escaped, so no character of a text can end the line.
        self._file.write(json.dumps(entry, ensure_ascii=True).encode() + b"\n")
        return None

    async def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def entry(self, response: PluginResponse) -> dict[str, Any]:
        request, usage = response.request, response.usage
        return {
            "time": None,
            "request_id": request.request_id,
            "tenant": request.tenant,
            "kind": request.kind,
            "model": request.model,
            "error": response.error,
            "seconds": round(response.elapsed_s, 6),
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "asked": self._kept(_asked(request)),
            "params": None if request.params is None else msgspec.to_builtins(request.params),
            "answered": [
                {
                    "finish_reason": choice.finish_reason,
                    "text": self._kept(choice.text),
                    "reasoning": self._kept(choice.reasoning) if choice.reasoning else None,
                    "tool_calls": self._kept(choice.tool_calls) if choice.tool_calls else None,
                }
                for choice in response.choices
            ],
        }

    def _kept(self, value: Any) -> Any:
        if self._keeps_texts:
            return value
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        data = text.encode("utf-8", "surrogatepass")
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _asked(request: PluginRequest) -> Any:
    if request.kind == "chat":
        asked: dict[str, Any] = {"messages": request.messages}
        return asked | {"tools": request.tools} if request.tools else asked
    if request.kind == "embedding":
        return {"inputs": request.inputs}
    asked = {"prompt": request.prompt}
    return asked | {"suffix": request.suffix} if request.suffix else asked


class PrivateLog:
    """A log file that only this user can read. When the file is full, it is renamed and a new file
    is begun.
    """

    def __init__(self, path: Path, max_bytes: int, max_files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handle = self._open()

    def write(self, line: bytes) -> None:
        if os.fstat(self._handle).st_size + len(line) > self._max_bytes:
            self._rotate()
        append_whole(self._handle, line)

    def close(self) -> None:
        os.close(self._handle)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self._path, flags | os.O_NONBLOCK, 0o600)
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(handle)
            raise ForeignFileError("it is not a plain file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(handle)
            raise ForeignFileError("others may read or write it")
        return handle

    def _rotate(self) -> None:
        """Add one to the number of each full file, make the current file PATH.1, and begin a new
        file. The oldest file is deleted.
        """
        names = [self._path, *(Path(f"{self._path}.{i}") for i in range(1, self._max_files))]
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            if newer.exists():
                newer.rename(older)
        os.close(self._handle)
        self._handle = self._open()
