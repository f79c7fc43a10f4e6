"""The folder of a job: its plan, its events, its checkpoints, and at last the adapter.

The training process writes here, and the process that started it reads. Both may be killed at any
time. A checkpoint is written under another name and renamed when it is whole.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Literal

import msgspec

ADAPTER = "adapter"
EVENTS = "events.jsonl"
OPTIMIZER = "optimizer.safetensors"  # in a checkpoint; only needed to continue the job
_CHECKPOINTS = "checkpoints"
_SCRATCH = "scratch"
_KEPT = 3  # number of checkpoints at ends of epochs that stay
_EPOCH, _WITHIN = "step", "within"  # a checkpoint at the end of an epoch, and any other one


class TrainingEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the events' file."""

    kind: Literal["loading", "metrics", "checkpoint", "notice", "paused", "succeeded", "failed"]
    step: int = 0
    num_steps: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    accuracy: float | None = None  # share of trained tokens, or of pairs, that the model gets right
    validation_accuracy: float | None = None
    margin: float | None = None  # of DPO: mean difference of the two answers' rewards
    validation_margin: float | None = None
    trained_tokens: int = 0  # since the start of the job
    tokens_per_s: float = 0.0  # of this step, prompts included
    message: str = ""  # of a notice, which the user should read, or of a failure


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def adapter(self) -> Path:
        """The finished adapter, as a PEFT folder."""
        return self.path / ADAPTER

    def tell(self, event: TrainingEvent) -> None:
        """Append an event. A line is one `write`, so a reader never sees half of one. Raises
        `OSError` without a trace in the file if the disk is full.
        """
        line = msgspec.json.encode(event) + b"\n"
        descriptor = os.open(self.path / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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

    def new_scratch(self) -> Path:
        """An empty folder for files that only this process needs. What an earlier process left
        there is removed.
        """
        self.remove_scratch()
        scratch = self.path / _SCRATCH
        scratch.mkdir()
        return scratch

    def remove_scratch(self) -> None:
        shutil.rmtree(self.path / _SCRATCH, ignore_errors=True)

    def remove_state(self) -> None:
        """Remove what only an unfinished job needs."""
        self.remove_scratch()
        for checkpoint in self._whole(_WITHIN):
            shutil.rmtree(checkpoint, ignore_errors=True)
        for checkpoint in self.checkpoints():
            (checkpoint / OPTIMIZER).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def checkpoints(self) -> list[Path]:
        """The last checkpoints at ends of epochs, the oldest first."""
        return self._whole(_EPOCH)

    def last_state(self) -> Path | None:
        """The checkpoint from which the job continues."""
        found = self._whole(_EPOCH) + self._whole(_WITHIN)
        return max(found, key=step_of, default=None)

    def _whole(self, kind: str) -> list[Path]:
        return sorted((self.path / _CHECKPOINTS).glob(f"{kind}-*[0-9]"))

    def new_checkpoint(self, step: int, *, ends_epoch: bool) -> Path:
        """An empty folder to write a checkpoint into."""
        kind = _EPOCH if ends_epoch else _WITHIN
        draft = self.path / _CHECKPOINTS / f"{kind}-{step:08d}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def keep_checkpoint(self, draft: Path) -> Path:
        """Make a written checkpoint visible, and remove old ones."""
        sync_files(draft)
        whole = draft.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        draft.rename(whole)
        older = [each for each in self._whole(_WITHIN) if each != whole]
        for old in self.checkpoints()[:-_KEPT] + older:
            shutil.rmtree(old, ignore_errors=True)
        return whole

    def remove_drafts(self) -> None:
        """Remove checkpoints that could not be written whole."""
        for draft in (self.path / _CHECKPOINTS).glob("*.draft"):
            shutil.rmtree(draft, ignore_errors=True)

    def keep_adapter(self, draft: Path) -> None:
        sync_files(draft)
        shutil.rmtree(self.adapter, ignore_errors=True)
        draft.rename(self.adapter)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def sync_files(folder: Path) -> None:
    """Write all files of a folder to the disk, so that a rename never shows empty ones."""
    for file in [*folder.iterdir(), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
