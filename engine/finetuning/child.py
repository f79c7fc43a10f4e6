"""The training process: `python -m engine.finetuning.child FOLDER PARENT_PID`.

It has limits of its own on CPU time and memory, ends with its parent, and tells all that happens
in the events of the job's folder. SIGTERM pauses it: it writes a checkpoint and exits with 0.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from engine.core.errors import EngineError
from engine.core.sandbox.processes import die_with_parent, prefer_oom_kill
from engine.finetuning.folder import JobFolder, TrainingEvent
from engine.finetuning.plan import TrainingPlan

NICE = 19


def main() -> None:
    folder = JobFolder(Path(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    prefer_oom_kill()
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        plan = TrainingPlan.read(folder.path)
        if plan.is_idle_only:
            _yield_cpu()
        folder.tell(TrainingEvent(kind="loading"))
        is_done = _train(folder, plan, stopped)
    except EngineError as error:
        _fail(folder, str(error))
    except Exception as error:  # anything else is told too, so that the job does not hang
        if isinstance(error, MemoryError) or "memory" in str(error).lower():
            _fail(folder, "there is not enough memory (finetuning.memory_mb, if it is set)")
        _fail(folder, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    sys.exit(0 if is_done or stopped else 1)


def _train(folder: JobFolder, plan: TrainingPlan, stopped: list[int]) -> bool:
    import torch

    from engine.finetuning.trainer import Trainer

    torch.set_num_threads(plan.threads)
    return Trainer(folder, plan).run(lambda: bool(stopped))


def _yield_cpu() -> None:
    """Use only CPU time that no other process wants."""
    os.nice(NICE)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _fail(folder: JobFolder, message: str) -> None:
    folder.tell(TrainingEvent(kind="failed", message=message))
    sys.exit(1)


if __name__ == "__main__":
    main()
