"""Starts the training process of a job, pauses it and ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from engine.core.sandbox.processes import kill_child, start_child
from engine.finetuning.folder import JobFolder

_LOG = "trainer.log"


class TrainerProcess:
    """A running training process. Its parent must not end before it."""

    def __init__(self, folder: JobFolder) -> None:
        log = os.open(
            folder.path / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        argv = [sys.executable, "-m", "engine.finetuning.child", str(folder.path)]
        try:
            self._child: subprocess.Popen[bytes] = start_child(
                [*argv, str(os.getpid())], (), output=log
            )
        finally:
            os.close(log)

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_status(self) -> int | None:
        """None while the process runs."""
        return self._child.poll()

    def hold(self) -> None:
        """Stop the process where it is, until `go_on`. It uses no CPU time and no memory bandwidth
        then, and keeps its memory.
        """
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        """Ask the process to write a checkpoint after this step, and to end."""
        self._signal(signal.SIGTERM)
        self.go_on()

    def kill(self) -> None:
        kill_child(self._child)

    def _signal(self, number: signal.Signals) -> None:
        if self._child.poll() is None:
            self._child.send_signal(number)


def how_it_ended(status: int) -> str:
    """A text for an exit status, which continues a sentence that begins with "the process"."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    memory = ", as happens when memory runs out" if status == -signal.SIGKILL else ""
    return f"was killed ({name}{memory})"


def log_tail(path: Path, num_lines: int = 5) -> str:
    """The last lines that the training process wrote, for the message of an unexpected end."""
    try:
        lines = (path / _LOG).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])
