"""The folder of a job: its plan, its events, its checkpoints, and at last the adapter.

The training process writes here, and the process that started it reads. Both may be killed at any
time. A checkpoint is written under another name and renamed when it is whole.
"""

import os
import shutil
from pathlib import Path
from typing import Literal

import msgspec

ADAPTER = "adapter"
EVENTS = "events.jsonl"
_CHECKPOINTS = "checkpoints"
_KEPT = 3  # number of checkpoints that stay


class TrainingEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the events' file."""

    kind: Literal["loading", "metrics", "checkpoint", "paused", "succeeded", "failed"]
    step: int = 0
    num_steps: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    trained_tokens: int = 0  # since the start of the job
    message: str = ""


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def adapter(self) -> Path:
        """The finished adapter, as a PEFT folder."""
        return self.path / ADAPTER

    def tell(self, event: TrainingEvent) -> None:
        """Append an event. A line is one `write`, so a reader never sees half of one."""
        line = msgspec.json.encode(event) + b"\n"
        descriptor = os.open(self.path / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def events(self, start: int = 0) -> tuple[list[TrainingEvent], int]:
        """The events after byte `start`, and the byte after them. A half line is left for later."""
        try:
            with (self.path / EVENTS).open("rb") as file:
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return [], start
        end = content.rfind(b"\n") + 1
        lines = content[:end].splitlines()
        return [msgspec.json.decode(line, type=TrainingEvent) for line in lines], start + end

    def checkpoints(self) -> list[Path]:
        """All whole checkpoints, the oldest first."""
        return sorted((self.path / _CHECKPOINTS).glob("step-*[0-9]"))

    def new_checkpoint(self, step: int) -> Path:
        """An empty folder to write a checkpoint into."""
        draft = self.path / _CHECKPOINTS / f"step-{step:08d}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def keep_checkpoint(self, draft: Path) -> Path:
        """Make a written checkpoint visible, and remove old ones."""
        sync_files(draft)
        whole = draft.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        draft.rename(whole)
        for old in self.checkpoints()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return whole

    def keep_adapter(self, draft: Path) -> None:
        sync_files(draft)
        shutil.rmtree(self.adapter, ignore_errors=True)
        draft.rename(self.adapter)


def sync_files(folder: Path) -> None:
    """Write all files of a folder to the disk, so that a rename never shows empty ones."""
    for file in [*folder.iterdir(), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
