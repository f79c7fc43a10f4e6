"""Starts child processes, and ties a child's life to its parent's."""

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
    """Call first in a child: the kernel then kills it when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # silently: the parent's end has been reported already


def offer_to_be_killed() -> None:
    """Raise this process's OOM score, so that the kernel kills it before its parent, which can
    restart it.
    """
    with contextlib.suppress(OSError):  # the file does not exist on every system
        Path("/proc/self/oom_score_adj").write_text("500")


def adopt_orphans() -> None:
    """Become the reaper of descendants: orphans become children of this process, so none is
    lost.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
