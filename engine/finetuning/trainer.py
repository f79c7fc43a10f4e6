"""The training loop. It can be stopped after any step, and continues from its last checkpoint.

A step depends only on the plan, its number and the state, so an interrupted job ends with the same
adapter as an undisturbed one.
"""

import contextlib
import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from engine.core.errors import EngineError, ResourceError
from engine.finetuning.adapter_model import (
    load_for_training,
    load_state,
    micro_batches,
    save_adapter,
    save_state,
    trained_parameters,
)
from engine.finetuning.data import read_examples
from engine.finetuning.folder import JobFolder, TrainingEvent, step_of
from engine.finetuning.losses import (
    Scores,
    base_log_probabilities,
    preference_loss,
    supervised_loss,
)
from engine.finetuning.memory import check_room, is_out_of_memory, limit_memory, release_memory
from engine.finetuning.plan import TrainingPlan
from engine.finetuning.tokens import ExampleTokenizer, TokenExample, TokenPair
from engine.frontend.text_model import TextModel, load_text
from engine.torch.execution.build import torch_device
from engine.worker.training_memory import MICRO_BATCH_TOKENS

_MAX_NORM = 1.0
_WARM_UP = 0.05  # share of the steps in which the learning rate grows
_LEAST_TOKENS = 256  # at a time, if memory is short
_RETRY_S = 10.0  # seconds after which a finished adapter is written again, if the disk is full

Tokens = TokenExample | TokenPair


class Trainer:
    def __init__(self, folder: JobFolder, plan: TrainingPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._step = self._num_steps = 0
        self._trained_tokens = 0
        self._max_tokens = MICRO_BATCH_TOKENS  # computed at once
        self._base: dict[TokenPair, torch.Tensor] = {}  # log-probabilities without the adapter
        self._recomputes = False  # the backward pass computes activations again
        device = torch_device(plan.device)
        text = load_text(Path(plan.base))
        check_room(plan, device, text.config.num_params)
        limit_memory(plan, device)
        self._train = self._examples(text, plan.training_file, "training_file")
        self._valid = (
            self._examples(text, plan.validation_file, "validation_file")
            if plan.validation_file
            else []
        )
        self._model = load_for_training(
            Path(plan.base), plan.lora, device, plan.seed, folder.new_scratch()
        )
        folder.remove_scratch()
        self._optimizer = torch.optim.AdamW(
            trained_parameters(self._model).values(), lr=plan.learning_rate, weight_decay=0.0
        )
        self._num_steps = plan.num_steps(len(self._train))
        self._steps_per_epoch = plan.steps_per_epoch(len(self._train))
        self._saved_at = self._epoch_saved_at = time.monotonic()

    def run(self, is_stopped: Callable[[], bool]) -> bool:
        """Train until the end, or until `is_stopped`. Returns whether the job is finished."""
        self._resume()
        while self._step < self._num_steps:
            if is_stopped():
                return self._pause()
            self._finish_step(*self._timed_step())
        waits = False
        while fault := self._write_adapter():
            if not waits:
                self._notice(f"The adapter can't be written, and is tried again: {fault}")
            waits = True
            if is_stopped():
                return self._pause()
            time.sleep(_RETRY_S)
        return True

    def _pause(self) -> bool:
        self._save(self._step % self._steps_per_epoch == 0)
        self._try_to_tell("paused")
        return False

    def _write_adapter(self) -> str:
        """Write the finished adapter. Returns why this failed, or an empty text."""
        draft = self._folder.path / "adapter.draft"
        try:
            draft.mkdir(exist_ok=True)
            save_adapter(self._model, draft)
            self._folder.keep_adapter(draft)
            self._tell("succeeded")
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            return str(error)
        return ""

    def _finish_step(self, figures: dict[str, float], tokens_per_s: float) -> None:
        """Tell the figures of a step, validate at the end of an epoch, and write a checkpoint if it
        is time.
        """
        ends_epoch = self._step % self._steps_per_epoch == 0
        valid = self._validate() if ends_epoch and self._valid else {}
        validation = {f"validation_{name}": value for name, value in valid.items()}
        self._try_to_tell("metrics", **figures, **validation, tokens_per_s=tokens_per_s)
        last = self._epoch_saved_at if ends_epoch else self._saved_at
        if time.monotonic() - last > self._plan.checkpoint_s:
            self._save(ends_epoch)

    def _examples(self, text: TextModel, path: str, param: str) -> list[Tokens]:
        plan = self._plan
        tokenizer = ExampleTokenizer(text, min(plan.max_tokens, text.config.max_position))
        examples = read_examples(Path(path), plan.method, param)
        found: Sequence[Tokens]
        if plan.method == "dpo":
            found = tokenizer.pairs(examples)
        else:
            found = tokenizer.supervised(examples)
        if tokenizer.notice:
            self._notice(f"{param.replace('_', ' ').capitalize()}: {tokenizer.notice}")
        return list(found)

    def _resume(self) -> None:
        found = self._folder.last_state()
        if found is not None:
            facts = load_state(self._model, self._optimizer, found)
            self._step = facts["step"]
            self._trained_tokens = facts["trained_tokens"]

    def _save(self, ends_epoch: bool) -> None:
        last = self._folder.last_state()
        if self._step == 0 or (last is not None and step_of(last) == self._step):
            return
        facts = {"step": self._step, "trained_tokens": self._trained_tokens}
        try:
            draft = self._folder.new_checkpoint(self._step, ends_epoch=ends_epoch)
            save_state(self._model, self._optimizer, facts, draft)
            self._folder.keep_checkpoint(draft)
        except (OSError, SafetensorError) as error:
            self._folder.remove_drafts()
            self._notice(f"Step {self._step} has no checkpoint, which can't be written: {error}")
            self._saved_at = self._epoch_saved_at = time.monotonic()
            return
        self._saved_at = time.monotonic()
        if ends_epoch:
            self._epoch_saved_at = self._saved_at
        self._try_to_tell("checkpoint")

    def _timed_step(self) -> tuple[dict[str, float], float]:
        began, batch = time.monotonic(), self._batch()
        figures = self._train_step(batch)
        if not math.isfinite(figures["loss"]):
            raise EngineError(
                f"the loss of step {self._step} is not finite; try a smaller"
                " learning_rate_multiplier"
            )
        return figures, sum(map(_num_tokens, batch)) / (time.monotonic() - began)

    def _train_step(self, batch: Sequence[Tokens]) -> dict[str, float]:
        self._model.train()
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.learning_rate * self._rate()
        scale = self._scale(batch)

        def gradients() -> list[Scores]:
            torch.manual_seed(self._plan.seed * 1_000_003 + self._step)  # dropout
            self._optimizer.zero_grad(set_to_none=True)
            found = []
            for part in self._parts(batch):
                scores = self._scores(part)
                (scores.loss / scale).backward()  # type: ignore[no-untyped-call]
                found.append(scores.detached())
            return found

        found = self._within_memory(batch, gradients)
        torch.nn.utils.clip_grad_norm_(trained_parameters(self._model).values(), _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        self._trained_tokens += sum(map(_num_trained, batch))
        return self._figures(found, scale)

    def _within_memory(
        self, batch: Sequence[Tokens], compute: Callable[[], list[Scores]]
    ) -> list[Scores]:
        """The result of `compute` for a batch. If memory is short, it is called again with smaller
        parts of the batch.
        """
        while True:
            with contextlib.suppress(_OutOfMemory):
                return _told(compute)
            release_memory()
            self._save_memory([_length(each) for each in batch])

    def _save_memory(self, lengths: Sequence[int]) -> None:
        parts, smaller = micro_batches(lengths, self._max_tokens), self._max_tokens
        while smaller > _LEAST_TOKENS and micro_batches(lengths, smaller) == parts:
            smaller //= 2
        if micro_batches(lengths, smaller) != parts:
            self._max_tokens = smaller
            change = f"steps are computed in parts of {smaller} tokens"
        elif not self._recomputes:
            self._recomputes = True
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            change = "the backward pass computes activations again, which takes longer"
        else:
            raise ResourceError(
                f"there is not enough memory for an example of {max(lengths)} tokens; give shorter "
                "ones, a smaller lora.rank or more memory (finetuning.memory_mb)"
            )
        self._notice(f"Memory is short: {change}.")

    def _batch(self) -> list[Tokens]:
        """The examples of this step. Each epoch has an order of its own."""
        epoch, index = divmod(self._step, self._steps_per_epoch)
        order = list(range(len(self._train)))
        random.Random(f"{self._plan.seed}:{epoch}").shuffle(order)
        size = self._plan.batch_size
        return [self._train[each] for each in order[index * size : (index + 1) * size]]

    def _rate(self) -> float:
        """The share of the learning rate: a linear warm-up, then a cosine to a tenth."""
        warm_up = max(1, round(_WARM_UP * self._num_steps))
        if self._step < warm_up:
            return (self._step + 1) / warm_up
        done = (self._step - warm_up) / max(1, self._num_steps - warm_up)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

    def _scores(self, part: Sequence[Any]) -> Scores:
        if self._plan.method == "dpo":
            base = torch.stack([self._base_of(pair) for pair in part])
            return preference_loss(self._model, part, base, self._plan.beta)
        return supervised_loss(self._model, part)

    def _base_of(self, pair: TokenPair) -> torch.Tensor:
        """The base model does not change, so each pair is computed once. It is computed alone, so
        that it does not depend on the batch in which it comes first.
        """
        if pair not in self._base:
            self._base[pair] = base_log_probabilities(self._model, pair)
        return self._base[pair]

    def _scale(self, batch: Sequence[Tokens]) -> int:
        """What a sum of losses is divided by: tokens, or pairs."""
        return len(batch) if self._plan.method == "dpo" else sum(map(_num_trained, batch))

    def _parts(self, batch: Sequence[Tokens]) -> list[list[Tokens]]:
        parts = micro_batches([_length(each) for each in batch], self._max_tokens)
        return [[batch[index] for index in part] for part in parts]

    def _validate(self) -> dict[str, float]:
        self._model.eval()
        with torch.no_grad():
            found = self._within_memory(
                self._valid, lambda: [self._scores(part) for part in self._parts(self._valid)]
            )
        return self._figures(found, self._scale(self._valid))

    def _figures(self, found: Sequence[Scores], scale: int) -> dict[str, float]:
        """Means over the tokens or pairs of a batch, under the names of `TrainingEvent`."""
        figures = {
            "loss": sum(float(each.loss) for each in found) / scale,
            "accuracy": sum(each.num_right for each in found) / scale,
        }
        if self._plan.method == "dpo":
            figures["margin"] = sum(each.margin for each in found) / scale
        return figures

    def _notice(self, text: str) -> None:
        self._try_to_tell("notice", message=text)

    def _try_to_tell(self, kind: Any, **facts: Any) -> None:
        """Tell an event that the job can do without."""
        with contextlib.suppress(OSError):  # the disk is full
            self._tell(kind, **facts)

    def _tell(self, kind: Any, **facts: Any) -> None:
        self._folder.tell(
            TrainingEvent(
                kind=kind,
                step=self._step,
                num_steps=self._num_steps,
                trained_tokens=self._trained_tokens,
                **facts,
            )
        )


class _OutOfMemory(Exception):
    """Stands for an error of PyTorch, whose traceback would keep all tensors of the step."""


def _told(compute: Callable[[], list[Scores]]) -> list[Scores]:
    try:
        return compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    raise _OutOfMemory


def _num_trained(example: Tokens) -> int:
    if isinstance(example, TokenPair):
        return example.preferred.num_trained + example.rejected.num_trained
    return example.num_trained


def _num_tokens(example: Tokens) -> int:
    if isinstance(example, TokenPair):
        return len(example.preferred.token_ids) + len(example.rejected.token_ids)
    return len(example.token_ids)


def _length(example: Tokens) -> int:
    if isinstance(example, TokenPair):
        return 2 * max(len(example.preferred.token_ids), len(example.rejected.token_ids))
    return len(example.token_ids)
