"""Starts child processes, and makes sure that they end when their parent does."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


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


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. A child process calls
    this first.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent has already ended; there is nothing to report


def offer_to_be_killed() -> None:
    """Raise this process's OOM score, so that the kernel kills this process before its parent. The
    parent can restart this process.
    """
    with contextlib.suppress(OSError):  # the file does not exist on every system
        Path("/proc/self/oom_score_adj").write_text("500")


def adopt_orphans() -> None:
    """Become the subreaper of all descendants. If the parent of a descendant ends, the descendant
    becomes a child of this process, so it can still be found.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
