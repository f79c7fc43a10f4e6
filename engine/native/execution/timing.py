"""Measures the time of each plan step on this machine. The forward passes that are timed are like
those of a server.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from engine.core.errors import ConfigError
from engine.core.memory import MIB
from engine.ipc.options import EngineOptions
from engine.native.execution.build import (
    STORED,
    build_runner,
    find_device,
    memory_needs,
)
from engine.runtime.model_runner import BatchInputs, RunnerConfig
from engine.weights.model import ModelSource

WARM_UPS = 3
MIN_FORWARDS, MAX_FORWARDS = 20, 200
MIN_SECONDS = 1.0  # timed passes are repeated for this long, but at most MAX_FORWARDS times


@dataclass(frozen=True, slots=True)
class Timing:
    """Median times in seconds. Only the faster half of the forward passes counts, because other
    processes may have slowed down the rest.
    """

    steps: tuple[float, ...]  # seconds of each plan step, in plan order
    forward: float  # seconds of the whole forward pass
    forwards: int  # number of forward passes in the faster half


def runner_config(tokens: int, sequences: int, context: int) -> RunnerConfig:
    """The default settings of a server. The KV cache has room for `sequences` sequences of
    `context` tokens each, and a step may have at least `tokens` tokens.
    """
    usual = _usual_options()
    return RunnerConfig(
        device="cpu",
        dtype=STORED,
        block_size=usual.block_size,
        num_blocks=1 + sequences * -(-context // usual.block_size),
        max_slots=max(usual.max_slots, sequences),
        max_seq_len=context,
        num_threads=usual.threads,
        max_batch_tokens=max(usual.max_batch_tokens, tokens),
    )


def time_steps(source: ModelSource, config: RunnerConfig, tokens: int, is_prompt: bool) -> Timing:
    """Times forward passes. With `is_prompt`, a pass computes the last `tokens` tokens of one
    prompt. Otherwise it computes one decode token for each of `tokens` sequences.

    Each sequence is `config.max_seq_len` tokens long, and its earlier tokens are in the KV cache.
    """
    _check_memory(source, config)
    runner = build_runner(source, config)
    try:
        model = runner._model
        step = _Inputs(config, source.config.vocab_size, 1 if is_prompt else tokens)
        length = tokens if is_prompt else 1
        start = config.max_seq_len - length
        for sequence in range(step.sequences):
            for chunk in range(0, start, config.max_batch_tokens):
                stop = min(start, chunk + config.max_batch_tokens)
                runner.forward(step.make([sequence], chunk, stop, is_prompt=True, logits=False))
        inputs = step.make(range(step.sequences), start, config.max_seq_len, is_prompt, logits=True)
        model.set_timing(True)
        runs: list[tuple[float, list[float]]] = []
        for _ in range(WARM_UPS):
            runner.forward(inputs)
        while len(runs) < MIN_FORWARDS or (
            len(runs) < MAX_FORWARDS and sum(seconds for seconds, _ in runs) < MIN_SECONDS
        ):
            began = time.perf_counter()
            runner.forward(inputs)
            runs.append((time.perf_counter() - began, model.op_seconds()))
    finally:
        runner.close()
    quick = sorted(runs)[: len(runs) // 2]
    forwards, steps = zip(*quick, strict=True)
    return Timing(tuple(map(median, zip(*steps, strict=True))), median(forwards), len(quick))


def _usual_options() -> EngineOptions:
    return EngineOptions(model_path="", framework="native")


def _check_memory(source: ModelSource, config: RunnerConfig) -> None:
    device = find_device("auto", "auto")
    needs = memory_needs(source, _usual_options(), device)
    cache = needs.token_bytes * config.block_size * config.num_blocks
    if needs.weight_bytes + cache > device.free_bytes:
        raise ConfigError(
            f"timing takes {needs.weight_bytes // MIB:,} MiB for weights and {cache // MIB:,} MiB "
            f"for keys and values, of which {device.free_bytes // MIB:,} MiB are free; lower "
            "--tokens or --context"
        )


class _Inputs:
    """Makes batches for sequences of random tokens. Each sequence has its own cache blocks."""

    def __init__(self, config: RunnerConfig, vocab_size: int, sequences: int) -> None:
        self.sequences = sequences
        self._block_size = config.block_size
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(0, vocab_size, (sequences, config.max_seq_len), np.int32)
        blocks = 1 + np.arange(config.num_blocks - 1, dtype=np.int32)
        self._tables = blocks.reshape(sequences, -1)

    def make(
        self, rows: Sequence[int], start: int, stop: int, is_prompt: bool, logits: bool
    ) -> BatchInputs:
        """A batch with the tokens `start` to `stop - 1` of the sequences `rows`. With `logits`, the
        logits of each sequence's last token are computed too.
        """
        slots = np.array(rows, np.int32)
        positions = np.arange(start, stop, dtype=np.int32)
        blocks = self._tables[slots][:, positions // self._block_size].astype(np.int64)
        query_start = np.arange(len(slots) + 1, dtype=np.int32) * len(positions)
        return BatchInputs(
            token_ids=self._tokens[slots, start:stop].reshape(-1),
            positions=np.tile(positions, len(slots)),
            write_slots=(blocks * self._block_size + positions % self._block_size).reshape(-1),
            query_start=query_start,
            seq_lens=np.full(len(slots), stop, np.int32),
            num_prompt=np.full(len(slots), stop if is_prompt else start, np.int32),
            block_tables=self._tables[slots],
            slots=slots,
            logit_rows=query_start[1:] - 1 if logits else np.zeros(0, np.int32),
            adapter_ids=np.zeros(len(slots), np.int32),
            prefix_groups=np.full(len(slots), -1, np.int32),
            prefix_blocks=np.zeros(0, np.int32),
        )
