"""How this package starts its child processes, and what such a child does about its parent."""

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
    """In a session of its own: a Ctrl-C in the terminal is for the parent to act on. `output` is
    where both of its streams go, if not to ours.
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
    """Called first thing in a child: the kernel kills it when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # in silence: what ended the parent has been told, and nobody waits for this


def offer_to_be_killed() -> None:
    """Where memory runs out, the kernel takes this process rather than the parent, which can start
    it again.
    """
    with contextlib.suppress(OSError):  # not everywhere is there such a file
        Path("/proc/self/oom_score_adj").write_text("500")


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that none gets lost."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
