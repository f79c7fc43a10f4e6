"""How this package starts its child processes, and what such a child does about its parent."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def start_child(argv: Sequence[str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C in the terminal is for the parent to act on."""
    return subprocess.Popen(
        argv, pass_fds=pass_fds, start_new_session=True, stdin=subprocess.DEVNULL
    )


def die_with_parent(parent_pid: int) -> None:
    """Called first thing in a child: the kernel kills it when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before the child had started")
