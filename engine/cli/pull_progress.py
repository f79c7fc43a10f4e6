"""Shows the progress of a download or conversion: a bar per file in a terminal, otherwise plain
lines.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class TerminalProgress:
    def __init__(self, console: Console, verb: str = "fetching") -> None:
        self._console = console
        self._verb = verb
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def update(self, file: str, done: int, total: int | None) -> None:
        if file not in self._tasks:
            self._tasks[file] = self._bars.add_task(file, total=total)
            if not self._console.is_terminal:
                self.note(f"{self._verb} {file}")
        self._bars.update(self._tasks[file], completed=done, total=total)

    def note(self, text: str) -> None:
        printable = "".join(each if each.isprintable() else " " for each in text)
        self._console.print(printable, markup=False, highlight=False, soft_wrap=True)


def pull_shown(spec: str, **options: Any) -> Path:
    """Download a model and show the progress on standard error. `options` are those of `pull`."""
    from engine.core.store.pull import pull

    with TerminalProgress(Console(stderr=True)) as progress:
        return pull(spec, progress=progress, **options)
