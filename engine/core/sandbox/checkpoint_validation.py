"""Validates model files: parses them in a process with limits before the server parses them.

Our parsers check every length and are tested with damaged files. The validation protects against
remaining bugs in them and in the libraries that they use. When a model was accepted, a small file
(its mark) is written. The model is not validated again while its files are unchanged, so only the
first start takes longer. This module imports no parser.
"""

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeAlias

from engine import __version__
from engine.core.errors import ModelFormatError, error_from_code
from engine.core.folders import store_directory
from engine.core.sandbox.private_files import open_private, write_private
from engine.core.sandbox.processes import kill_child

log = logging.getLogger(__name__)

CHILD_MODULE = "engine.core.sandbox.validation_child"
MAX_SECONDS = 120.0
MAX_CPU_S = 60
MAX_MARKS = 512
MAX_FILES = 10_000  # in the folder of a model
MAX_REPORT_BYTES = 4096
MAX_OUTPUT_BYTES = 32 << 20
# A file that changed less than this many seconds ago may change again without a new time stamp. So
# its validation is not remembered.
_SETTLED_SECONDS = 2.0


class Reading(Protocol):
    """A process with limits that parses a model file."""

    def wait(self, max_seconds: float) -> tuple[int, bytes]:
        """Wait until the process ends. Returns its exit status and output. Raises `TimeoutError`
        after `max_seconds`.
        """
        ...

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        ...


# Type of a function that starts a validator. Its arguments are the validator, the path and the
# limit of CPU seconds. A validator is the "module:function" of a function that takes the path, and
# a function that it may call when all is checked that an engine process reads. It returns bytes
# worth caching, or None.
StartReading: TypeAlias = Callable[[str, Path, int], Reading]


class Spawned:
    """Runs a validator in a new process with limits."""

    def __init__(self, validator: str, path: Path, max_cpu_s: int) -> None:
        arguments = (validator, str(path), str(max_cpu_s), str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-m", CHILD_MODULE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def wait(self, max_seconds: float) -> tuple[int, bytes]:
        try:
            output, _ = self._process.communicate(timeout=max_seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return self._process.returncode, output

    def end(self) -> None:
        kill_child(self._process)


class Validation:
    """The validation of one model. It is under way, or the model was validated earlier."""

    def __init__(
        self,
        path: Path,
        validator: str,
        start: StartReading = Spawned,
        *,
        max_seconds: float = MAX_SECONDS,
        max_cpu_s: int = MAX_CPU_S,
    ) -> None:
        key = f"{path.resolve()}\0{validator}"
        self._path, self._max_seconds = path, max_seconds
        self._mark = _marks_directory() / hashlib.sha256(key.encode()).hexdigest()
        self._identity = identity_of(path)
        self._reading: Reading | None = None
        if self._identity is not None and not _is_marked(self._mark, self._identity):
            self._reading = start(validator, path, max_cpu_s)

    @property
    def is_under_way(self) -> bool:
        return self._reading is not None

    def finish(self) -> bytes:
        """Wait for the end of the validation. Returns the validator's output, or b"" if the model
        was validated earlier or its files changed meanwhile. Raises an error if the model is
        invalid or exceeded the limits.
        """
        if self._reading is None:
            return b""
        name = self._path.name
        try:
            status, output = self._reading.wait(self._max_seconds)
        except TimeoutError:
            raise ModelFormatError(
                f"{name} could not be read within {self._max_seconds:g} s: it is damaged or hostile"
            ) from None
        finally:
            self._reading.end()
        report = "" if status == 0 else output[:MAX_REPORT_BYTES].decode("utf-8", "replace").strip()
        if status == 1 and report:
            code, _, message = report.partition(" ")
            raise error_from_code(code, message)
        if status != 0:
            raise ModelFormatError(
                f"{name} could not be read within limits of memory and time (status"
                f" {status}): it is damaged or hostile"
            )
        assert self._identity is not None
        _remember(self._mark, self._identity, self._path)
        return output if identity_of(self._path) == self._identity else b""


def validate(
    path: Path,
    validator: str,
    start: StartReading = Spawned,
    *,
    max_seconds: float = MAX_SECONDS,
    max_cpu_s: int = MAX_CPU_S,
) -> bytes:
    """Run `validator` on a model in a process with limits, unless this was done before and the
    model's files are unchanged. Returns the result of `Validation.finish`.
    """
    begun = Validation(path, validator, start, max_seconds=max_seconds, max_cpu_s=max_cpu_s)
    return begun.finish()


def _marks_directory() -> Path:
    return store_directory().parent / "examined"


def files_of(path: Path) -> list[Path]:
    """The files of a model. For a folder: everything in it. For one part of a split GGUF: all GGUF
    files beside it. Otherwise: the file itself. Raises `ModelFormatError` if a folder has too many
    files to be one of a model.
    """
    if not path.is_dir() and "-of-" not in path.name:
        return [path]
    found = path.rglob("*") if path.is_dir() else path.parent.glob("*.gguf")
    files = list(islice(found, MAX_FILES + 1))
    if len(files) > MAX_FILES:
        raise ModelFormatError(f"{path} has more than {MAX_FILES:,} files: it is no model's folder")
    return sorted(files)


def identity_of(path: Path) -> bytes | None:
    """A hash of the paths, inodes, sizes and times of a model's files and of our version. None if
    the files can't be read.
    """
    try:
        files = files_of(path)
        facts: list[object] = [__version__]
        for file in files:
            status = file.stat()
            facts += (str(file), status.st_ino, status.st_size)
            facts += (status.st_mtime_ns, status.st_ctime_ns)
    except OSError:
        return None  # the code that opens the file later gives a better error
    return hashlib.sha256(repr(facts).encode()).digest()


def _is_marked(mark: Path, identity: bytes) -> bool:
    try:
        with open_private(mark) as file:
            return file.read(len(identity) + 1) == identity
    except OSError:
        return False


def _remember(mark: Path, identity: bytes, path: Path) -> None:
    try:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(mark.parent)
        newest = max(file.stat().st_ctime for file in files_of(path))
        if mark.parent.stat().st_mtime - newest < _SETTLED_SECONDS:
            return
        marks = sorted(mark.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for old in marks[: max(len(marks) - MAX_MARKS + 1, 0)]:
            old.unlink(missing_ok=True)
        write_private(mark, identity)
    except OSError as error:
        log.info("the validation of %s can't be cached: %s", path.name, error)
