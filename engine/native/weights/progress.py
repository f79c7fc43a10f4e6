"""Reports how far the packing of weights has come. If stderr is a terminal, this is a progress bar,
which appears only if packing takes longer than a second. Otherwise it is log lines of
level debug.
"""

import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
_MIB = 1024 * 1024


class PackingProgress:
    def __init__(self, name: str) -> None:
        self._name = name
        self._started_at = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Reports that `done` of `total` bytes are packed."""
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        if not is_terminal:
            log.debug("packing %s: %d of %d MiB", self._name, done // _MIB, total // _MIB)
            return
        if self._bar is None:
            if time.monotonic() - self._started_at < PATIENCE_S or done >= total:
                return
            self._bar = self._new_bar(total)
        self._bar.update(self._bar.task_ids[0], completed=done)
        if done >= total:
            self._bar.stop()

    def _new_bar(self, total: int) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("packing {task.description}"), BarColumn(), DownloadColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(self._name, total=total)
        bar.start()
        return bar
