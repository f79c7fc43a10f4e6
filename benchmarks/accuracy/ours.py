"""Perplexity and greedy continuations by the native runner, driven step by step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from benchmarks.accuracy.text import WINDOW
from engine.ir.plan import Machine
from engine.native.compiled import kernels
from engine.native.execution import build
from engine.native.execution.build import STORED, build_runner
from engine.native.execution.runner import NativeRunner
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import ModelSource
from tests.parity.runner_driver import RunnerDriver

_BLOCK = 16
_ROWS = 16  # passages per step: the smallest batch that uses the fast kernels
_MAX_TOKENS = 1024  # max tokens of a passage of a few sentences


@dataclass(frozen=True, slots=True)
class Numerics:
    """How tokens are computed: the runner's settings, and whether the text counts as prefill."""

    label: str
    dtype: str = STORED
    kv_dtype: str = "auto"
    as_prompt: bool = True
    setting: str = "invariant"  # or "fast"
    chunk: int = WINDOW  # tokens of a window per step: half of them or all


DEFAULT = Numerics("default, as prompt")
GENERATED = Numerics("default, as generated", as_prompt=False)
FLOAT = Numerics("float32", dtype="float32")
INT8_KV = Numerics("int8 KV, as prompt", kv_dtype="int8")
INT8_KV_GENERATED = Numerics("int8 KV, as generated", kv_dtype="int8", as_prompt=False)
# Steps as large as those of a busy server.
FAST = Numerics("fast, steps of 256", setting="fast", chunk=WINDOW // 2)
ALL_NUMERICS = (DEFAULT, GENERATED, FAST, FLOAT, INT8_KV, INT8_KV_GENERATED)


@contextmanager
def running(
    source: ModelSource, numerics: Numerics, threads: int | None, isa: str | None = None
) -> Iterator[NativeRunner]:
    """A runner with the kernels of an instruction set; None: the best one of this CPU. The KV cache
    has the type that it has on a CPU for which this instruction set is the best.
    """
    native, kv_dtype = kernels(), numerics.kv_dtype
    isa = isa or native.instruction_sets()[-1]
    if numerics.setting == "fast" and kv_dtype == "auto":
        kv_dtype = "int8" if native.prefers_int8_cache(isa) else "bfloat16"
    config = RunnerConfig(
        device="cpu",
        dtype=numerics.dtype,
        block_size=_BLOCK,
        num_blocks=1 + _ROWS * _MAX_TOKENS // _BLOCK,
        # A step returns at most 128 more rows of logits than there are slots; a window needs half
        # of its tokens.
        max_slots=WINDOW // 2,
        max_seq_len=_MAX_TOKENS,
        num_threads=threads,
        max_batch_tokens=_ROWS * _MAX_TOKENS,
        kv_dtype=kv_dtype,
        numerics=numerics.setting,
    )
    with mock.patch.object(build, "machine_with", lambda threads: _machine(threads, isa)):
        runner = build_runner(source, config)
    try:
        yield runner
    finally:
        runner.close()


def _machine(threads: int, isa: str) -> Machine:
    return Machine(threads, isa, kernels().has_bf16(isa))


def perplexity(runner: NativeRunner, numerics: Numerics, windows: Sequence[list[int]]) -> float:
    """The perplexity of the second half of every window, given all earlier tokens of the window."""
    first, total, count = WINDOW // 2, 0.0, 0
    for window in windows:
        driver = RunnerDriver(runner)
        track = driver.add(window)
        track.num_prompt = len(window) if numerics.as_prompt else 0
        while track.num_computed + numerics.chunk < WINDOW:
            nothing = np.zeros(0, np.int32)
            runner.forward(replace(driver.inputs([(track, numerics.chunk)]), logit_rows=nothing))
            track.num_computed += numerics.chunk
        scored = np.arange(first, WINDOW - 1, dtype=np.int32) - track.num_computed
        inputs = replace(driver.inputs([(track, numerics.chunk)]), logit_rows=scored)
        logits = runner.logits(runner.forward(inputs)).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(scored)), window[first + 1 :]]
        total += float(np.sum(np.log(np.exp(logits).sum(axis=1)) - chosen))
        count += len(scored)
    return float(np.exp(total / count))


def continuations(
    runner: NativeRunner, numerics: Numerics, prompts: Sequence[list[int]], counts: Sequence[int]
) -> list[list[int]]:
    """`counts[i]` greedy tokens after each prompt."""
    found = []
    for at in range(0, len(prompts), _ROWS):
        driver = RunnerDriver(runner)
        tracks = [driver.add(prompt) for prompt in prompts[at : at + _ROWS]]
        for track in tracks:
            track.num_prompt = len(track.tokens) if numerics.as_prompt else 0
        for _ in range(max(counts[at : at + _ROWS])):
            driver.step([(track, len(track.tokens) - track.num_computed) for track in tracks])
        found += [
            track.tokens[len(prompt) : len(prompt) + count]
            for track, prompt, count in zip(
                tracks, prompts[at : at + _ROWS], counts[at : at + _ROWS], strict=True
            )
        ]
    return found
