"""`--numerics fast` on the default model: per-channel int8 for many rows, unchanged for few."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engine.core.text.tokenizer import Tokenizer
from engine.ipc.options import EngineOptions
from engine.native.execution.build import (
    STORED,
    build_runner,
    find_device,
    kernels,
    memory_needs,
)
from engine.native.execution.runner import NativeRunner
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import ModelSource, open_model
from tests.parity.runner_driver import RunnerDriver

TEXT = Path(__file__).parents[2] / "data" / "alice.txt"
FAST_ROWS = 16  # of csrc/executor/linear_ops.cpp
OFF_FLOAT = 0.1  # the default's generated tokens are off by 0.03 here, fast ones by 0.05 to 0.09
Runners = Callable[..., NativeRunner]


@pytest.fixture(scope="module")
def source(default_model: Path) -> Iterator[ModelSource]:
    source = open_model(default_model)
    yield source
    source.close()


@pytest.fixture(scope="module")
def text_ids(source: ModelSource) -> list[int]:
    text = TEXT.read_text(encoding="ascii")
    return Tokenizer.from_gguf(source.metadata).encode(text[:4000])


@pytest.fixture(scope="module")
def runners(source: ModelSource) -> Runners:
    @cache
    def runner(numerics: str, dtype: str = STORED, kv_dtype: str = "auto") -> NativeRunner:
        config = RunnerConfig(
            device="cpu",
            dtype=dtype,
            block_size=16,
            num_blocks=128,
            max_slots=32,
            max_seq_len=512,
            num_threads=2,
            numerics=numerics,
            kv_dtype=kv_dtype,
        )
        return build_runner(source, config)

    return runner


def has_per_channel() -> bool:
    native = kernels()
    return bool(native.has_per_channel(native.instruction_sets()[-1]))


def with_one_cache(runners: Runners) -> tuple[NativeRunner, NativeRunner]:
    """Fast, and the default with a cache of the same type."""
    native = kernels()
    is_int8 = native.prefers_int8_cache(native.instruction_sets()[-1])
    return runners("fast"), runners("invariant", kv_dtype="int8" if is_int8 else "auto")


def logits_after(runner: NativeRunner, prompts: list[list[int]]) -> np.ndarray:
    """Of the last token of each prompt, whole prompts but for that token being computed before."""
    driver = RunnerDriver(runner)
    tracks = [driver.add(prompt) for prompt in prompts]
    for track in tracks:
        runner.forward(driver.inputs([(track, len(track.tokens) - 1)]))
        track.num_computed = len(track.tokens) - 1
        track.num_prompt = track.num_computed
    return runner.logits(runner.forward(driver.inputs([(track, 1) for track in tracks])))


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The distance of a row, relative to the row, in the mean."""
    distance = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(distance.mean())


@pytest.fixture(scope="module")
def many_prompts(text_ids: list[int]) -> list[list[int]]:
    return [text_ids[i * 20 : i * 20 + 8] for i in range(27)]


@pytest.fixture(scope="module")
def in_float(runners: Runners, many_prompts: list[list[int]]) -> np.ndarray:
    """A row of it does not depend on how many there are."""
    return logits_after(runners("invariant", "float32"), many_prompts)


def test_fast_numerics_are_bit_identical_to_the_default_for_few_rows(
    runners: Runners, text_ids: list[int]
) -> None:
    prompts = [text_ids[i * 20 : i * 20 + 1 + i] for i in range(1, FAST_ROWS - 1)]
    found, expected = (logits_after(each, prompts) for each in with_one_cache(runners))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [FAST_ROWS, 27])
def test_fast_numerics_stay_near_float_for_many_decode_rows(
    runners: Runners,
    text_ids: list[int],
    many_prompts: list[list[int]],
    in_float: np.ndarray,
    rows: int,
) -> None:
    prompts = many_prompts[:rows]
    found = logits_after(runners("fast"), prompts)
    assert 0 < off(found, in_float[:rows]) < OFF_FLOAT
    if has_per_channel():  # within this arithmetic a row does not depend on those beside it
        more = logits_after(runners("fast"), [*prompts, text_ids[:12]])
        np.testing.assert_array_equal(more[:rows], found)


def after_prompt(runner: NativeRunner, prompt: list[int]) -> np.ndarray:
    driver = RunnerDriver(runner)
    return runner.logits(runner.forward(driver.inputs([(driver.add(prompt), len(prompt))])))


@pytest.mark.parametrize("length", [2 * FAST_ROWS, 129])
def test_fast_numerics_stay_near_float_for_prompts(
    runners: Runners, text_ids: list[int], length: int
) -> None:
    prompt = text_ids[:length]
    found, default = (after_prompt(each, prompt) for each in with_one_cache(runners))
    assert np.array_equal(found, default) == (not has_per_channel())
    assert 0 < off(found, after_prompt(runners("invariant", "float32"), prompt)) < OFF_FLOAT


def test_float_arithmetic_has_no_fast_variant(
    runners: Runners, many_prompts: list[list[int]], in_float: np.ndarray
) -> None:
    found = logits_after(runners("fast", "float32"), many_prompts[:FAST_ROWS])
    np.testing.assert_array_equal(found, in_float[:FAST_ROWS])


def test_requantized_weights_are_counted_in_the_memory_plan(source: ModelSource) -> None:
    def weight_bytes(numerics: str, dtype: str = "auto") -> int:
        options = EngineOptions(model_path="", framework="native", numerics=numerics, dtype=dtype)
        return memory_needs(source, options, find_device("auto", dtype)).weight_bytes

    more = weight_bytes("fast") - weight_bytes("invariant")
    params = source.config.num_params
    assert params <= more <= 1.01 * params if has_per_channel() else more == 0
    assert weight_bytes("fast", "float32") == weight_bytes("invariant", "float32")
