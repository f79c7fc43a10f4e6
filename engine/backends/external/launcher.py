"""Runs an external program and makes sure that none of its processes stays behind.

`python -m engine.backends.external.launcher FD` runs in its own session. FD is a socket to the
parent process. The parent sends one line of JSON that says what to run. When the parent ends for
any reason, the socket closes. Then, or on SIGTERM, the launcher sends SIGTERM to the program and
waits for some time. After that it kills the program and all descendants, also those in other
sessions. Descendants are also killed when the program ends by itself. If the parent has ended, the
launcher deletes the files that the parent would have deleted. The launcher's exit status is that of
the program, or 128 plus the number of the signal that ended the program.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from engine.core.sandbox.processes import adopt_orphans, die_with_parent

NOT_STARTED = 127
KILL_INTERVAL_S = 0.02
# Max grace period after the parent has ended, even if a longer one is configured.
ORPHAN_GRACE_S = 1.5
# Python starts a process with this module for programs that use shared memory. When the programs
# have ended, this process removes the shared memory that they left, and ends. So it is killed only
# if it still runs after TRACKER_GRACE_S.
TRACKER = "multiprocessing.resource_tracker"
TRACKER_GRACE_S = 1.0


class Launcher:
    def __init__(self, parent: socket.socket, grace_s: float) -> None:
        self._parent = parent
        self._grace_s = grace_s
        self._deadline: float | None = None  # after SIGTERM: when to kill the program
        self._status: int | None = None
        self._pid = 0
        self.is_orphaned = False

    def run(self, argv: Sequence[str], env: Mapping[str, str]) -> int:
        adopt_orphans()
        wakes, theirs = socket.socketpair()
        for each in (wakes, theirs):
            each.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ask_to_end(self._grace_s))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the handler makes the signal wake `select`
        try:
            self._pid = subprocess.Popen(argv, env=env, preexec_fn=_dies_with(os.getpid())).pid
        except OSError as error:
            print(f"{argv[0]} can't be started: {error.strerror}", file=sys.stderr, flush=True)
            return NOT_STARTED
        self._watch(wakes)
        kill_all(self._reap)
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

    def _watch(self, wakes: socket.socket) -> None:
        """Wait until the program has ended, or its grace period is over."""
        sources = [self._parent, wakes]
        while self._status is None:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            readable, _, _ = select.select(sources, [], [], left)
            # The parent sends nothing more. So if the socket is readable, the parent has ended.
            if self._parent in readable:
                sources.remove(self._parent)
                self.is_orphaned = True
                self._ask_to_end(min(self._grace_s, ORPHAN_GRACE_S))
            if wakes in readable:
                wakes.recv(4096)
            self._reap()

    def _ask_to_end(self, grace_s: float) -> None:
        is_asked = self._deadline is not None
        deadline = time.monotonic() + grace_s
        self._deadline = min(deadline, self._deadline or deadline)
        if self._pid and not is_asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._pid:
                    self._status = ended[1]


def kill_all(reap: Callable[[], None]) -> None:
    """Kill all descendants of this process, until none is left. A descendant may start new ones
    meanwhile.
    """
    deadline = time.monotonic() + TRACKER_GRACE_S
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                is_spared = time.monotonic() < deadline and TRACKER in " ".join(child.cmdline())
                if not is_spared:
                    child.kill()
        time.sleep(KILL_INTERVAL_S)
        reap()
    reap()


def remove_leavings(record: str, folder: str) -> None:
    """Delete the run's record file, and the folder of its socket and temporary files."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _dies_with(pid: int) -> Callable[[], None]:
    return lambda: die_with_parent(pid)


def main() -> None:
    parent = socket.socket(fileno=int(sys.argv[1]))
    with parent.makefile("rb") as lines:
        told = lines.readline()
    if not told.endswith(b"\n"):
        sys.exit("the parent ended before it had told what to run")
    order = json.loads(told)
    launcher = Launcher(parent, order["grace_s"])
    status = launcher.run(order["argv"], order["env"])
    if launcher.is_orphaned:
        remove_leavings(order["record"], order["folder"])
    sys.exit(status)


if __name__ == "__main__":
    main()
