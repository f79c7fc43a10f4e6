"""What engines inside the same memory limit have planned and not taken yet.

A KV pool takes its memory when blocks are first used. So an engine that starts would find memory
free that another one has planned with. Inside a limit, at which processes are killed, each engine
writes its plan to a file of its user, and plans with what the others leave. Entries of processes
that have ended are dropped. Without a limit, nothing is written.
"""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.core.memory import MIB, cgroup_limits, memory_room

log = logging.getLogger(__name__)

MAX_FILE_BYTES = MIB


@dataclass(slots=True)
class Reservation:
    """`others` is what other engines will still take. `planned` is what this engine plans with."""

    others: int = 0
    planned: int = 0

    @property
    def note(self) -> str:
        if not self.others:
            return ""
        return f"other engines have planned with {self.others / MIB:,.0f} MiB more"


@contextmanager
def reservation(path: Path | None = None) -> Iterator[Reservation]:
    """Hold the file while an engine plans. Its plan is written at the end, if it has one."""
    if path is None:
        path = Path(tempfile.gettempdir()) / f"engine-memory-{os.getuid()}"
        if not (memory_room().is_limited and cgroup_limits()):  # others count, too
            yield Reservation()
            return
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("the plans of other engines are unknown: %s", error)
        yield Reservation()
        return
    with os.fdopen(handle, "r+b") as file:
        if os.fstat(handle).st_uid != os.getuid():
            log.warning("the plans of other engines are unknown: %s is another user's", path)
            yield Reservation()
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        entries = _living(file.read(MAX_FILE_BYTES))
        made = Reservation(sum(max(0, each[2] - _taken(each[0])) for each in entries))
        yield made
        if made.planned:
            own = os.getpid()
            entries.append((own, _started(own), made.planned))
        file.seek(0)
        file.truncate()
        file.write("".join(f"{pid} {began} {size}\n" for pid, began, size in entries).encode())


def _living(content: bytes) -> list[tuple[int, int, int]]:
    """The entries of other processes that still run: pid, start time and planned bytes."""
    found = []
    for line in content.splitlines():
        words = line.split()
        if len(words) == 3 and all(each.isdigit() and len(each) < 19 for each in words):
            pid, began, size = map(int, words)
            if pid != os.getpid() and began == _started(pid) != 0:
                found.append((pid, began, size))
    return found


def _started(pid: int) -> int:
    """When a process was started. 0 if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    state, *fields = stat.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])


def _taken(pid: int) -> int:
    """The bytes that a process has, except for pages of files."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    fields = (sizes.get(name, "0 kB").split()[0] for name in ("RssAnon", "RssShmem"))
    return 1024 * sum(map(int, fields))
