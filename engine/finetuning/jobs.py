"""Makes the folder of a new job: checks its files and decides its hyperparameters."""

import os
import secrets
from importlib.util import find_spec
from pathlib import Path

import msgspec

from engine.core.errors import InvalidRequestError
from engine.finetuning.data import Method, count_examples
from engine.finetuning.folder import JobFolder
from engine.finetuning.plan import (
    PLAN_NAME,
    Hyperparameters,
    LoraShape,
    TrainingPlan,
    check_lora,
    decide,
)

_PACKAGES = ("torch", "transformers", "peft", "accelerate")


class TrainingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a user wants trained."""

    base: Path
    training_file: Path
    validation_file: Path | None = None
    method: Method = "supervised"
    hyperparameters: Hyperparameters = Hyperparameters()
    lora: LoraShape = LoraShape()
    seed: int | None = None
    device: str = "cpu"
    threads: int | None = None
    memory_bytes: int | None = None
    is_idle_only: bool = False
    checkpoint_s: float = 30.0


def make_job(request: TrainingRequest, path: Path) -> tuple[JobFolder, TrainingPlan]:
    """Write the plan of a new job into the folder `path`. Raises `InvalidRequestError` if a file or
    a value is wrong, before anything is written.
    """
    _check_packages()
    if (path / PLAN_NAME).exists():  # its checkpoints are of other examples
        raise InvalidRequestError(f"there is a job in {path} already", param="output")
    check_lora(request.lora)
    num_examples = count_examples(request.training_file, request.method)
    if request.validation_file is not None:
        count_examples(request.validation_file, request.method, "validation_file")
    decided = decide(request.hyperparameters, num_examples, request.method)
    plan = TrainingPlan(
        base=str(request.base.resolve()),
        method=request.method,
        training_file=str(request.training_file.resolve()),
        validation_file=(
            None if request.validation_file is None else str(request.validation_file.resolve())
        ),
        seed=secrets.randbelow(2**31) if request.seed is None else request.seed,
        lora=request.lora,
        device=request.device,
        threads=request.threads or len(os.sched_getaffinity(0)),
        memory_bytes=request.memory_bytes,
        is_idle_only=request.is_idle_only,
        checkpoint_s=request.checkpoint_s,
        **msgspec.structs.asdict(decided),
    )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan.write(path)
    return JobFolder(path), plan


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise InvalidRequestError(
            f"training needs {', '.join(missing)}, which {are} missing:"
            " pip install 'engine[finetune]'",
            code="not_installed",
        )


def adapter_name(base: str, suffix: str, job_id: str) -> str:
    """The model id under which the result is served, as OpenAI writes it."""
    return f"ft:{base}:{suffix}:{job_id}"
