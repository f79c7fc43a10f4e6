"""Even steps against large ones: gaps between tokens, times to first token, and throughput.

    python -m benchmarks.gpu.pacing
    python -m benchmarks.gpu.pacing --streams 64 --frontend-ms 0.4 --token-us 8

The engine's own loop and scheduler run with a model of a GPU: a step takes `fixed + row x decode
rows + token x prompt tokens`. The clock is that of the model, so the results are the same on every
machine. The defaults fit a Llama of 1B parameters on an H200. Clients are a closed loop of N
streams, as those of a load test: each sends its next request when it has its last token. Answers of
one length keep the streams in step, so that requests come in bursts; "about" are answers of random
lengths. Requests reach the engine one after the other, because a frontend takes time for each.
"""

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.core.interfaces.request import (
    Deltas,
    FromEngine,
    GenerateRequest,
    SamplingParams,
    ToEngine,
)
from engine.ipc.options import EngineOptions
from engine.runtime import loop as engine_loop
from engine.runtime.model_runner import (
    GPU_STEP_S,
    BatchInputs,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.worker.main import build_loop

BLOCK_SIZE, MAX_SLOTS, MAX_BATCH_TOKENS, MAX_SEQ_LEN = 16, 1024, 8192, 8192
CLIENT_S = 0.001  # from a stream's last token until its next request reaches the frontend
EVEN_RATIO, LATE_RATIO = 2.0, 3.0  # limits of a gap and of a first token, in medians


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of a step's parts, and those that the frontend takes for a request."""

    fixed_s: float
    row_s: float
    token_s: float
    frontend_s: float

    def step_s(self, num_rows: int, num_prompt_tokens: int) -> float:
        return self.fixed_s + self.row_s * num_rows + self.token_s * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of streams. Each sends `rounds` requests of this shape."""

    streams: int
    num_prompt: int
    num_new: int
    rounds: int
    varies: bool = False  # whether answers have other lengths than `num_new`, which is their mean

    @property
    def label(self) -> str:
        about = "about " * self.varies
        return f"{self.streams:,} x {self.num_prompt:,} in, {about}{self.num_new:,} out"

    def length(self, stream: int, number: int) -> int:
        """The number of tokens of an answer."""
        if not self.varies:
            return self.num_new
        return Random(f"{stream} {number}").randint(self.num_new // 4, 7 * self.num_new // 4)


LOADS = (
    Load(64, 128, 128, 8),
    Load(64, 128, 128, 16, varies=True),
    Load(256, 128, 128, 8),
    Load(256, 128, 128, 8, varies=True),
    Load(256, 512, 256, 4),
    Load(256, 512, 256, 8, varies=True),
    Load(1024, 128, 128, 4),
    Load(1024, 128, 128, 4, varies=True),
    Load(32, 7000, 256, 1),
)


class Clock:
    """Time that only passes when something waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait_until(self, due: float) -> None:
        self.now = max(self.now, due)


class ModelledRunner:
    """Takes the time of a GPU, and computes nothing. Steps run one after the other."""

    def __init__(self, costs: Costs, clock: Clock, *, paces: bool) -> None:
        num_blocks = MAX_SLOTS * 1024 // BLOCK_SIZE + 1
        self.spec = RunnerSpec(
            *(BLOCK_SIZE, num_blocks, MAX_SLOTS, MAX_SEQ_LEN, 32_000, 1),
            target_step_s=GPU_STEP_S,
            paces=paces,
        )
        self._costs, self._clock = costs, clock
        self._free_at = 0.0

    def forward(self, inputs: BatchInputs) -> int:
        lengths = np.diff(inputs.query_start)
        num_rows = int((lengths == 1).sum())
        seconds = self._costs.step_s(num_rows, len(inputs.token_ids) - num_rows)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return len(lengths)

    def sample(self, handle: int, sampling: SamplingInputs) -> "PendingStep":
        return PendingStep(self._clock, self._free_at, len(sampling.sample_rows), handle)

    def logits(self, handle: int, rows: Any) -> Any:
        raise AssertionError("no row of this benchmark is sampled on the host")

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class PendingStep:
    clock: Clock
    due: float
    num_samples: int
    num_rows: int

    def wait(self) -> StepOutput:
        self.clock.wait_until(self.due)
        return StepOutput(np.ones(self.num_samples, np.int32), np.ones(self.num_rows, np.bool_))


@dataclass
class Streams:
    """The clients, as the engine's channel. A request is `stream`, then its number."""

    load: Load
    costs: Costs
    clock: Clock
    sent_at: dict[str, float] = field(default_factory=dict)
    seen_at: dict[str, float] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_ended: int = 0
    _arriving: list[tuple[float, int, int]] = field(default_factory=list)
    _frontend_free_at: float = 0.0

    def begin(self) -> None:
        for stream in range(self.load.streams):
            self._ask(stream, 0, 0.0)

    @property
    def is_done(self) -> bool:
        return self.num_ended == self.load.streams * self.load.rounds

    def poll(self, timeout_s: float) -> list[ToEngine]:
        if timeout_s and self._arriving:
            self.clock.wait_until(self._arriving[0][0])
        messages: list[ToEngine] = []
        while self._arriving and self._arriving[0][0] <= self.clock.now:
            _, stream, number = heapq.heappop(self._arriving)
            messages.append(self._request(stream, number))
        return messages

    def send(self, message: FromEngine) -> None:
        now = self.clock.now
        for delta in message.deltas if isinstance(message, Deltas) else ():
            assert delta.error_code is None, delta.error_message
            key = delta.request_id
            if key in self.seen_at:
                self.gaps_s.append(now - self.seen_at[key])
            else:
                self.first_s.append(now - self.sent_at[key])
            self.seen_at[key] = now
            if delta.finish_reason is not None:
                self.num_ended += 1
                stream, number = map(int, key.split())
                if number + 1 < self.load.rounds:
                    self._ask(stream, number + 1, now)

    def _ask(self, stream: int, number: int, now: float) -> None:
        self.sent_at[f"{stream} {number}"] = now
        self._frontend_free_at = max(self._frontend_free_at, now + CLIENT_S) + self.costs.frontend_s
        heapq.heappush(self._arriving, (self._frontend_free_at, stream, number))

    def _request(self, stream: int, number: int) -> GenerateRequest:
        # No two prompts share a block.
        prompt = (stream, number, *range(1, self.load.num_prompt - 1))
        num_new = self.load.length(stream, number)
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        return GenerateRequest(request_id=f"{stream} {number}", prompt=prompt, params=params)


@dataclass(frozen=True, slots=True)
class Result:
    tokens_per_s: float
    gap_s: float  # median
    gap_p99_s: float
    first_s: float  # median
    last_first_s: float  # of the request that waited longest
    num_late: int  # first tokens over three medians

    @property
    def gap_ratio(self) -> float:
        return self.gap_p99_s / self.gap_s

    @property
    def first_ratio(self) -> float:
        return self.last_first_s / self.first_s


def measure(load: Load, costs: Costs, *, paces: bool) -> Result:
    clock = Clock()
    streams = Streams(load, costs, clock)
    runner = ModelledRunner(costs, clock, paces=paces)
    options = EngineOptions(
        model_path="", framework="", max_slots=MAX_SLOTS, max_batch_tokens=MAX_BATCH_TOKENS
    )
    with patch.object(engine_loop, "time", clock):
        loop = build_loop(runner, options, 1, streams)
        streams.begin()
        while not streams.is_done:
            loop.turn(1.0)
    return _result(streams, clock.now)


def _result(streams: Streams, seconds: float) -> Result:
    first_s = median(streams.first_s)
    return Result(
        tokens_per_s=(len(streams.first_s) + len(streams.gaps_s)) / seconds,
        gap_s=median(streams.gaps_s),
        gap_p99_s=float(np.percentile(streams.gaps_s, 99)),
        first_s=first_s,
        last_first_s=max(streams.first_s),
        num_late=sum(each > LATE_RATIO * first_s for each in streams.first_s),
    )


def results_table(rows: Sequence[tuple[Load, Result, Result]]) -> Table:
    table = Table("streams", "steps", box=None)
    titles = ("tok/s", "of large", "gap ms", "p99", "first ms", "last", f"over {LATE_RATIO:.0f}x")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for load, large, even in rows:
        for name, found in (("large", large), ("even", even)):
            table.add_row(
                load.label if found is large else "",
                name,
                f"{found.tokens_per_s:,.0f}",
                f"{found.tokens_per_s / large.tokens_per_s:.3f}",
                f"{1e3 * found.gap_s:.2f}",
                f"{found.gap_ratio:.2f}x",
                f"{1e3 * found.first_s:.1f}",
                f"{found.first_ratio:.1f}x",
                str(found.num_late),
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024, 32])
    parser.add_argument("--fixed-ms", type=float, default=1.2)
    parser.add_argument("--row-us", type=float, default=4.7)
    parser.add_argument("--token-us", type=float, default=4.0, help="of prefill")
    parser.add_argument("--frontend-ms", type=float, default=0.1, help="for each request")
    given = parser.parse_args()
    costs = Costs(
        given.fixed_ms / 1e3, given.row_us / 1e6, given.token_us / 1e6, given.frontend_ms / 1e3
    )
    rows = []
    for load in LOADS:
        if load.streams in given.streams:
            large, even = (measure(load, costs, paces=paces) for paces in (False, True))
            rows.append((load, large, even))
    Console(width=120).print(results_table(rows))


if __name__ == "__main__":
    main()
