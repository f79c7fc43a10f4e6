"""Starts child processes, and makes sure that they end with their parent."""

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
    """Start a child in a new session, so that Ctrl-C only reaches the parent. `output` receives
    stdout and stderr; None means ours.
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
    """Call it first in a child process. The kernel then kills the child when the thread that
    started it ends.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent has already ended; there is nothing to report


def offer_to_be_killed() -> None:
    """Raise this process's OOM score, so that the kernel kills it before its parent, which can
    restart it.
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
