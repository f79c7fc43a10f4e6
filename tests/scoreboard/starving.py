"""Gives processes a tenth of a processor, as a machine does that has far too much to do."""

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

PERIOD_US, SHARE = 100_000, 0.1
CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def starved(pids: Sequence[int]) -> Iterator[str]:
    """Starve the processes, and the children that they start meanwhile. Yields how: by a quota of a
    cgroup if one can be made here, else by stopping them for nine tenths of the time.
    """
    try:
        group, how = _make_group(), "cgroup"
    except OSError:
        with _stopped_mostly(pids):
            yield "signals"
        return
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield how
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def _make_group() -> Path:
    """A cgroup with a quota, of version 1 or 2."""
    v1 = CGROUPS / "cpu"
    group = (v1 if v1.is_dir() else CGROUPS) / f"starved-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    quota = int(SHARE * PERIOD_US)
    try:
        if v1.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    except OSError:
        group.rmdir()
        raise
    return group


@contextlib.contextmanager
def _stopped_mostly(pids: Sequence[int]) -> Iterator[None]:
    done = threading.Event()

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def alternate() -> None:
        while not done.is_set():
            send(signal.SIGSTOP)
            time.sleep((1 - SHARE) * PERIOD_US / 1e6)
            send(signal.SIGCONT)
            time.sleep(SHARE * PERIOD_US / 1e6)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        send(signal.SIGCONT)
