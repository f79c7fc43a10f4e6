"""The C++ executor against the numpy references, for every part that a decoder can have."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.architectures.base import ExpertsConfig, ModelConfig, RopeConfig
from engine.ir.execute import ReferenceBatch, State, run_graph
from engine.ir.models.decoder import build_graph
from engine.ir.reference import F32
from engine.native import machine
from engine.native.execution.build import build_runner
from engine.native.execution.runner import NativeRunner
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import ModelSource
from tests.parity.runner_driver import RunnerDriver, Track
from tests.support.files.memory_models import memory_source
from tests.support.references.ir_driver import CONFIGS, Driver, new_state, random_weights, text
from tests.unit.ir.test_ir_families import MIXES


def runner_for(
    source: ModelSource, dtype: str = "float32", num_threads: int = 2, numerics: str = "invariant"
) -> NativeRunner:
    settings = {
        "device": "cpu",
        "dtype": dtype,
        "block_size": 16,
        "num_blocks": 64,
        "max_slots": 16,
        "max_seq_len": source.config.max_position,
        "num_threads": num_threads,
        "numerics": numerics,
    }
    return build_runner(source, RunnerConfig(**settings))


def last_logits(driver: RunnerDriver, work: list[tuple[Track, int]]) -> np.ndarray:
    logits = driver.runner.logits(driver.runner.forward(driver.inputs(work)))
    for track, count in work:
        track.num_computed += count
    return logits


@pytest.mark.parametrize("changes", MIXES.values(), ids=MIXES)
def test_native_logits_equal_the_graph(changes: dict[str, Any]) -> None:
    """A prompt in two chunks beside another prompt, then one token of each."""
    config = replace(CONFIGS["qwen3"], family="madeup", **changes)
    graph = build_graph(config)
    weights = random_weights(graph)

    def forward(batch: ReferenceBatch, state: State) -> F32:
        return run_graph(graph, weights, batch, state)

    reference, native = (
        Driver(forward, new_state(config)),
        RunnerDriver(runner_for(memory_source(config, weights))),
    )
    texts = text(40), text(18, seed=1)
    theirs, ours = ([driver.add(each) for each in texts] for driver in (reference, native))
    for counts in ((23, 0), (16, 17), (1, 1)):
        chosen = [index for index in range(2) if counts[index]]
        expected = reference.step([(theirs[index], counts[index]) for index in chosen])
        found = last_logits(native, [(ours[index], counts[index]) for index in chosen])
        if len(found):  # only rows with the text's last token have logits
            size = np.abs(expected).max()
            np.testing.assert_allclose(found, expected[-len(found) :], atol=1e-4 * size, rtol=0)


EXPERTS = ExpertsConfig(8, 2, 64, renormalizes=True, shared_size=32, shared_gate=True)


@pytest.mark.parametrize("matrix_type", ["Q4_0", "Q8_0", "BF16"])
def test_mixture_of_experts_results_are_bit_identical_alone_and_batched(matrix_type: str) -> None:
    """To the last bit: an expert's GEMM has other rows in each batch."""
    config = _quantizable()
    source = memory_source(config, random_weights(build_graph(config)), matrix_type)
    texts = [text(length, seed=length) for length in (33, 7, 1, 12)]
    driver = RunnerDriver(runner_for(source, "stored"))
    tracks = [driver.add(each) for each in texts]
    last_logits(driver, [(tracks[0], 20), (tracks[1], 6)])
    together = last_logits(
        driver, [(tracks[0], 13), (tracks[1], 1), (tracks[2], 1), (tracks[3], 12)]
    )
    for row, each in zip(together, texts, strict=True):
        alone = RunnerDriver(runner_for(source, "stored"))
        np.testing.assert_array_equal(row, last_logits(alone, [(alone.add(each), len(each))])[0])


@pytest.mark.seconds
@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_the_number_of_threads_does_not_change_a_bit(numerics: str) -> None:
    """With many threads, matmuls with fewer panels than threads are cut by rows, too."""
    config = replace(_quantizable(), experts=None, max_position=256)
    source = memory_source(config, random_weights(build_graph(config)), "Q4_0")
    expected = two_steps(runner_for(source, "stored", 1, numerics))
    for num_threads in (2, 3, 7, 16, 64):
        found = two_steps(runner_for(source, "stored", num_threads, numerics))
        np.testing.assert_array_equal(found, expected)


def two_steps(runner: NativeRunner) -> np.ndarray:
    """The logits of a step of prefill and of a step of prefill and decode, beside each other."""
    driver = RunnerDriver(runner)
    tracks = [driver.add(text(length, seed=length)) for length in (221, 60, 9)]
    steps = [[*zip(tracks, counts, strict=True)] for counts in ((150, 59, 8), (71, 1, 1))]
    return np.concatenate([last_logits(driver, work) for work in steps])


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("nodes", [(0, 0, 0, 1, 1), (0, 1), (0, 1, 2, 3), (2, 2, 7, 2)])
def test_numa_nodes_do_not_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], numerics: str
) -> None:
    """Threads of several NUMA nodes compute with copies of the weights, experts' too. The nodes are
    made up, so their pages are all in the same memory here.
    """
    config = replace(_quantizable(), max_position=256)
    source = memory_source(config, random_weights(build_graph(config)), "Q4_0")
    expected = two_steps(runner_for(source, "stored", 1, numerics))
    placement = machine.Placement((tuple(machine.usable_cpus()),) * len(nodes), nodes)
    monkeypatch.setattr(machine, "place_threads", lambda affinity, threads: placement)
    found = two_steps(runner_for(source, "stored", len(nodes), numerics))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("matrix_type", ["Q4_0", "Q8_0"])
def test_quantized_experts_compute_with_the_stored_values(matrix_type: str) -> None:
    """In float arithmetic, packed panels give what the dequantized matrices give."""
    config = _quantizable()
    graph = build_graph(config)
    source = memory_source(config, random_weights(graph), matrix_type)
    stored = {name: weight.numpy() for name, weight in source.weights.items()}

    def forward(batch: ReferenceBatch, state: State) -> F32:
        return run_graph(graph, stored, batch, state)

    reference = Driver(forward, new_state(config))
    native = RunnerDriver(runner_for(source))
    tokens = text(30)
    expected = reference.step([(reference.add(tokens), 30)])[0]
    found = last_logits(native, [(native.add(tokens), 30)])[0]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def _quantizable() -> ModelConfig:
    return replace(
        CONFIGS["qwen3"],
        family="madeup",
        hidden_size=64,
        head_dim=32,
        intermediate_size=96,
        rope=RopeConfig(10000.0, 32),
        experts=EXPERTS,
    )
