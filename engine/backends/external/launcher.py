"""Runs a program that knows nothing of us, and sees to it that nothing of it stays behind.

`python -m engine.backends.external.launcher FD` has its own session. FD is a socket whose other
end the parent holds. One line of JSON comes over it: what to run (its environment may be another
interpreter's, so it is not this one's). When the parent ends, however it ends, the socket closes.
On this, and on SIGTERM, the program is asked to end and given some time; then it and every
descendant is killed, also those in other sessions. The same when the program ends by itself. What
the parent would have removed, had it lived, is removed then. The exit status is the program's, or
128 plus the signal that ended it.
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
# Who lost its parent serves nobody, however long it would like to have.
ORPHAN_GRACE_S = 1.5
# What Python starts beside programs that share memory: once they are gone it removes what they left
# of it, and ends.
TRACKER = "multiprocessing.resource_tracker"
TRACKER_GRACE_S = 1.0


class Launcher:
    def __init__(self, parent: socket.socket, grace_s: float) -> None:
        self._parent = parent
        self._grace_s = grace_s
        self._deadline: float | None = None  # of a program that was asked to end
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
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop below
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
        """Until the program has ended, or had its time to."""
        sources = [self._parent, wakes]
        while self._status is None:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            readable, _, _ = select.select(sources, [], [], left)
            if self._parent in readable:  # nothing more is ever sent: the parent is gone
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
        with contextlib.suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._pid:
                    self._status = ended[1]


def kill_all(reap: Callable[[], None]) -> None:
    """Every descendant; again, until none has been started meanwhile."""
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
    """The file that told of this run, and the folder of its socket and temporary files."""
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
