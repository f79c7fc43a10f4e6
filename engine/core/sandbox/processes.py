"""Starts child processes, makes sure that they end when their parent does, and prepares processes
that live long.
"""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GARBAGE_OBJECTS = 50_000  # number of new objects after which the garbage collector runs
# The tokens of a thousand streams are some hundred kilobytes per step. The kernel may grant less.
SEND_BYTES = 2**20
# A process that was killed ends within milliseconds, unless it waits in the kernel, for example for
# a disk that does not answer.
KILLED_WITHIN_S = 10.0


def start_child(
    argv: Sequence[str],
    pass_fds: Sequence[int],
    *,
    env: Mapping[str, str] | None = None,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child process in a new session, so that Ctrl-C only reaches the parent. `output` is
    the file descriptor for its stdout and stderr; None means that it uses ours.
    """
    return subprocess.Popen(
        argv,
        pass_fds=pass_fds,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=env,
    )


def kill_child(process: subprocess.Popen[Any]) -> None:
    """Kill a child process, and wait until it has ended. One that waits in the kernel is left
    behind after `KILLED_WITHIN_S`.
    """
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_WITHIN_S)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Sockets between this process and a child. Their send buffers are large, so that a burst of
    messages does not make the sender wait for a receiver that is busy for a moment.
    """
    pair = socket.socketpair()
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    return pair


def keep_all() -> None:
    """Exempt all existing objects from garbage collection, and make the garbage collector run less
    often.

    Objects that exist when a process starts to serve live until it ends, so scanning them for
    garbage wastes time. The many small objects of a step or of an event are freed by reference
    counting, so they need not trigger collections.
    """
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    gc.enable()


# What this process adds to the OOM score of its parent, and the largest score.
OOM_SCORE, MAX_OOM_SCORE = 500, 1000


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. A child process calls
    this first.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent has already ended; there is nothing to report


def prefer_oom_kill() -> None:
    """Raise this process's OOM score, so that the kernel kills this process before its parent. The
    parent can restart this process. Containers may start the parent with a high score already.
    """
    with contextlib.suppress(OSError):  # the file does not exist on every system
        file = Path("/proc/self/oom_score_adj")
        file.write_text(str(min(MAX_OOM_SCORE, int(file.read_text()) + OOM_SCORE)))


def adopt_orphans() -> None:
    """Become the subreaper of all descendants. If the parent of a descendant ends, the descendant
    becomes a child of this process, so it can still be found.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
