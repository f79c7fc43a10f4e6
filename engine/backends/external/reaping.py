"""Finds and kills child processes that a crashed server has left. Processes are identified by pid
and start time, so that a later process with the same pid is not killed.

While a child runs, a file in a private folder lists its processes. The server that started the
child keeps the file locked. If that server crashes, the lock is released. Then the next start of
any child kills the listed processes.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from engine.core.sandbox.private_files import ForeignFileError, open_private

log = logging.getLogger(__name__)

GONE_WITHIN_S = 5.0
_SUFFIX = ".json"


class ProcessMark(msgspec.Struct, frozen=True):
    """Identifies a process by pid and start time, because a pid may be used again later."""

    pid: int
    started: str


class ChildRecord(msgspec.Struct, frozen=True):
    """What to clean up if the server that started a child crashes."""

    name: str
    processes: tuple[ProcessMark, ...]
    folder: str = ""  # folder with the child's socket and temporary files


def mark_of(pid: int) -> ProcessMark | None:
    """The mark of a running process. None if there is no such process."""
    started = _started(pid)
    return None if started is None else ProcessMark(pid, started)


def family_of(mark: ProcessMark) -> list[ProcessMark]:
    """Marks of the process and of its descendants. Empty if the process has ended."""
    if mark_of(mark.pid) != mark:
        return []
    try:
        children = psutil.Process(mark.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    marks = [mark_of(child.pid) for child in children]
    return [mark, *(each for each in marks if each is not None)]


def memory_of(marks: Iterable[ProcessMark]) -> int:
    """Resident memory of these processes, in bytes."""
    total = 0
    for mark in marks:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += psutil.Process(mark.pid).memory_info().rss
    return total


def kill_marked(marks: Iterable[ProcessMark]) -> int:
    """Kill these processes and all their descendants. Waits until they have ended, but at most
    `GONE_WITHIN_S`, because a process that waits for a device can't be killed. Returns how many
    were killed.
    """
    killed: set[ProcessMark] = set()
    deadline = time.monotonic() + GONE_WITHIN_S
    marks = list(marks)
    while left := {each for mark in marks for each in family_of(mark) if not _is_dead(each)}:
        if time.monotonic() > deadline:
            log.error("these processes can't be killed: %s", sorted(each.pid for each in left))
            break
        for mark in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                psutil.Process(mark.pid).kill()
        killed |= left
        time.sleep(0.01)
    return len(killed)


class RecordFile:
    """The file with the record of one running child. It stays locked until `remove`."""

    def __init__(self, record: ChildRecord, directory: Path | None = None) -> None:
        directory = directory or run_directory()
        self._record = record
        # Lock the file first. Then rename it to a name that other servers look for.
        handle, name = tempfile.mkstemp("", ".", directory)
        self._file = os.fdopen(handle, "wb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.path = directory / f"{Path(name).name.lstrip('.')}{_SUFFIX}"
        self._write()
        os.rename(name, self.path)

    @property
    def processes(self) -> tuple[ProcessMark, ...]:
        return self._record.processes

    def update(self, processes: Iterable[ProcessMark]) -> None:
        """Add processes to the record. Processes that have ended stay in it, because their
        descendants may still run.
        """
        known = tuple(dict.fromkeys((*self._record.processes, *processes)))
        if known != self._record.processes:
            self._record = msgspec.structs.replace(self._record, processes=known)
            self._write()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()
        _remove_folder(self._record.folder)

    def _write(self) -> None:
        content = msgspec.json.encode(self._record)
        os.pwrite(self._file.fileno(), content, 0)
        os.ftruncate(self._file.fileno(), len(content))


def run_directory() -> Path:
    """The folder for record files: $XDG_RUNTIME_DIR/engine, or else ~/.cache/engine/run. It is
    created with mode 0700.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(base) / "engine" if os.path.isabs(base) else Path.home() / ".cache/engine/run"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    return path


def reap_stale(directory: Path | None = None) -> int:
    """Kill all recorded processes whose server has ended. Returns how many were killed."""
    num_killed = 0
    for path in sorted((directory or run_directory()).glob(f"[!.]*{_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):
            num_killed += _reap(path)
    return num_killed


def _reap(path: Path) -> int:
    try:
        file = open_private(path)
    except ForeignFileError as error:
        log.warning("%s is left alone: %s", path, error)
        return 0
    with file:
        if not _lock(file):
            return 0  # the server that started the child still runs
        try:
            record = msgspec.json.decode(file.read(), type=ChildRecord)
        except msgspec.DecodeError:
            log.warning("%s holds no record of a child; it is removed", path)
            path.unlink(missing_ok=True)
            return 0
        num_killed = kill_marked(record.processes)
        if num_killed:
            log.warning("ended %d processes of %s from an earlier run", num_killed, record.name)
        _remove_folder(record.folder)
        path.unlink(missing_ok=True)
        return num_killed


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_folder(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _started(pid: int) -> str | None:
    try:
        if sys.platform != "linux":
            return repr(psutil.Process(pid).create_time())
        # The start time is in clock ticks since boot, so changes of the clock don't affect it.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{_boot_id()}:{int(fields[19])}"
    except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _is_dead(mark: ProcessMark) -> bool:
    """Whether the process is a zombie or has ended."""
    try:
        return bool(psutil.Process(mark.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
