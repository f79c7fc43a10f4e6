"""The figures of jobs as clients and Prometheus see them: events, checkpoints, step_metrics.csv and
gauges.
"""

import csv
import io
import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.finetuning.folder import TrainingEvent
from engine.servers.files.expiry import unix_now
from engine.servers.fine_tuning.hold import Hold
from engine.servers.fine_tuning.schema import STATUSES

_TOKENS, _PAIRS = "mean_token_accuracy", "reward_accuracy"


def figures_of(event: TrainingEvent) -> dict[str, float]:
    """The figures of a step under OpenAI's names. Those of DPO have names of their own."""
    accuracy = _TOKENS if event.margin is None else _PAIRS
    named = {
        "train_loss": event.loss,
        f"train_{accuracy}": event.accuracy,
        "train_reward_margin": event.margin,
        "valid_loss": event.validation_loss,
        f"valid_{accuracy}": event.validation_accuracy,
        "valid_reward_margin": event.validation_margin,
    }
    return {name: value for name, value in named.items() if value is not None}


def by_step(events: Iterable[TrainingEvent]) -> dict[int, TrainingEvent]:
    """The metrics of each step. A step that was repeated after a checkpoint counts once."""
    return {event.step: event for event in events if event.kind == "metrics"}


def step_metrics(events: Iterable[TrainingEvent]) -> bytes:
    """The result file of a job: a CSV file with a line per step, as OpenAI has it."""
    steps = by_step(events)
    is_dpo = any(event.margin is not None for event in steps.values())
    columns = [
        "train_loss",
        "train_accuracy",
        "valid_loss",
        f"valid_{_PAIRS if is_dpo else _TOKENS}",
    ]
    if is_dpo:
        columns += ["train_reward_margin", "valid_reward_margin"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["step", *columns], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for step in sorted(steps):
        figures = figures_of(steps[step])
        if (accuracy := steps[step].accuracy) is not None:
            figures["train_accuracy"] = accuracy
        writer.writerow({name: f"{each:.5f}" for name, each in figures.items()} | {"step": step})
    return text.getvalue().encode()


class Pace:
    """The mean time of the steps of a training process, breaks for requests included."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # time and number of the first step
        self.finish: int | None = None  # when the last step will end, in seconds since 1970

    def observe(self, event: TrainingEvent) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now, event.step
            return
        began, step = self._first
        seconds = (now - began) / max(1, event.step - step)
        self.finish = unix_now() + round(seconds * (event.num_steps - event.step))


class JobMetrics:
    """Prometheus metrics of jobs. They exist once there is a job. One job trains at a time, so they
    have no label for the job.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"engine_finetuning_{name}", text, registry=registry)

        self._jobs = Gauge(
            "engine_finetuning_jobs", "Fine-tuning jobs by status", ("status",), registry=registry
        )
        self._step = gauge("step", "Last step of the job that trains, or of the last one")
        self._steps = gauge("steps", "Steps that the job has in all")
        self._loss = gauge("loss", "Training loss of the last step")
        self._validation = gauge("validation_loss", "Validation loss after the last epoch")
        self._rate = gauge("tokens_per_second", "Tokens trained per second in the last step")
        self._held = gauge("held", "1 while training is held because requests are open, else 0")
        self._tokens = Counter(
            "engine_finetuning_trained_tokens", "Tokens that jobs trained on", registry=registry
        )
        self.deaths = Counter(
            "engine_finetuning_deaths", "Training processes that died", registry=registry
        )
        self._num_trained = -1  # tokens of the training process so far; -1: not known yet

    def count(self, statuses: Mapping[str, int]) -> None:
        for status in STATUSES:
            self._jobs.labels(status).set(statuses.get(status, 0))

    def begin(self, hold: Hold | None) -> None:
        """A training process starts. It may repeat steps, so its first tokens do not count."""
        self._num_trained = -1
        if hold is not None:
            self._held.set_function(lambda: hold.is_held)

    def observe(self, event: TrainingEvent) -> None:
        self._step.set(event.step)
        self._steps.set(event.num_steps)
        self._rate.set(event.tokens_per_s)
        if event.loss is not None:
            self._loss.set(event.loss)
        if event.validation_loss is not None:
            self._validation.set(event.validation_loss)
        if 0 <= self._num_trained < event.trained_tokens:
            self._tokens.inc(event.trained_tokens - self._num_trained)
        self._num_trained = event.trained_tokens

    def end(self) -> None:
        self._rate.set(0)
        self._held.set_function(lambda: 0)


def event_data(event: TrainingEvent) -> dict[str, Any]:
    return {"step": event.step, "total_steps": event.num_steps, **figures_of(event)}
