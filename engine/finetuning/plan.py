"""What a job trains, with every hyperparameter decided. It is a file of the job's folder."""

import math
import re
from pathlib import Path
from typing import Literal

import msgspec

from engine.core.errors import InvalidRequestError
from engine.finetuning.data import Method

PLAN_NAME = "plan.json"
MAX_RANK = 256
SUFFIX = r"^[A-Za-z0-9._-]{1,64}$"  # of a job's name
# Small sets need many epochs and large ones few, so the number of steps is what stays the same.
_STEPS = 240
_MAX_EPOCHS = 30
_LEARNING_RATE = 1e-3
_DPO_LEARNING_RATE = 1e-4
_MAX_BATCH = 32


class Hyperparameters(msgspec.Struct, frozen=True, kw_only=True):
    """As a client states them. "auto" is decided by the number of examples."""

    n_epochs: int | Literal["auto"] = "auto"
    batch_size: int | Literal["auto"] = "auto"
    learning_rate_multiplier: float | Literal["auto"] = "auto"
    beta: float | Literal["auto"] = "auto"  # of DPO: how closely to stay with the base model


class LoraShape(msgspec.Struct, frozen=True, kw_only=True):
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()  # empty: all linear layers of the blocks


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    base: str  # path of the model
    method: Method
    training_file: str
    validation_file: str | None
    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float
    seed: int
    lora: LoraShape
    device: str = "cpu"
    threads: int = 1
    max_tokens: int = 2048  # longer examples are cut
    memory_bytes: int | None = None  # of the training process. None: no limit
    is_idle_only: bool = False  # use only CPU time that no other process wants
    checkpoint_s: float = 30.0  # seconds between checkpoints

    @property
    def learning_rate(self) -> float:
        base = _DPO_LEARNING_RATE if self.method == "dpo" else _LEARNING_RATE
        return base * self.learning_rate_multiplier

    def num_steps(self, num_examples: int) -> int:
        return self.n_epochs * self.steps_per_epoch(num_examples)

    def steps_per_epoch(self, num_examples: int) -> int:
        return math.ceil(num_examples / self.batch_size)

    def write(self, folder: Path) -> None:
        (folder / PLAN_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def read(cls, folder: Path) -> "TrainingPlan":
        return msgspec.json.decode((folder / PLAN_NAME).read_bytes(), type=cls)


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters without "auto"."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float


def decide(wanted: Hyperparameters, num_examples: int) -> Decided:
    """Replace each "auto" by a number. Raises `InvalidRequestError` if a value is out of range."""
    for name, low, high in (
        ("n_epochs", 1, 1000),
        ("batch_size", 1, 1024),
        ("learning_rate_multiplier", 1e-4, 100.0),
        ("beta", 1e-4, 10.0),
    ):
        value = getattr(wanted, name)
        if value != "auto" and not low <= value <= high:
            raise InvalidRequestError(
                f"{name} must be between {low:g} and {high:g}, or auto", param=name
            )
    batch = max(1, min(_MAX_BATCH, num_examples // 8))
    if wanted.batch_size != "auto":
        batch = min(wanted.batch_size, num_examples)
    epochs = min(_MAX_EPOCHS, max(1, round(_STEPS * batch / num_examples)))
    if wanted.n_epochs != "auto":
        epochs = wanted.n_epochs
    rate = wanted.learning_rate_multiplier
    return Decided(
        n_epochs=epochs,
        batch_size=batch,
        learning_rate_multiplier=1.0 if rate == "auto" else rate,
        beta=0.1 if wanted.beta == "auto" else wanted.beta,
    )


def check_suffix(suffix: str) -> None:
    if not re.fullmatch(SUFFIX, suffix):
        raise InvalidRequestError(
            "a suffix has 1 to 64 letters, digits, dots, dashes and underscores", param="suffix"
        )


def check_lora(shape: LoraShape) -> None:
    if not 1 <= shape.rank <= MAX_RANK:
        raise InvalidRequestError(f"rank must be between 1 and {MAX_RANK}", param="rank")
    if not 0 < shape.alpha <= 4096:
        raise InvalidRequestError("alpha must be above 0 and at most 4096", param="alpha")
    if not 0 <= shape.dropout < 1:
        raise InvalidRequestError("dropout must be from 0 to below 1", param="dropout")
