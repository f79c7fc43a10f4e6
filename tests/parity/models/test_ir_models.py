"""Plan and graph, run in numpy, against Transformers in float32 on tiny random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.architectures.base import RopeConfig
from engine.core.errors import ModelFormatError
from engine.ir import rotary
from engine.ir.execute import ReferenceBatch, State, run_graph, run_plan
from engine.ir.models.decoder import build_graph
from engine.ir.plan import Capacity, Machine
from engine.ir.planner import plan
from engine.ir.reference import F32
from engine.torch.layers import rotary as torch_rotary
from engine.weights.model import open_model
from tests.parity import tiny_models
from tests.support.references.ir_driver import Driver, new_state

TOLERANCE = 1e-4
ROPES = [
    RopeConfig(10000.0, 32),
    RopeConfig(500000.0, 128, "linear", factor=4.0),
    RopeConfig(10000.0, 32, "dynamic", factor=4.0, original_max_position=64),
    RopeConfig(
        *(500000.0, 64, "llama3"),
        factor=8.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    RopeConfig(10000.0, 32, "yarn", factor=4.0, original_max_position=64, beta_fast=4.0),
    RopeConfig(1e6, 64, "yarn", factor=2.0, original_max_position=512, attention_factor=1.2),
    RopeConfig(10000.0, 32, "factors"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads crawl where other processes share the cores."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_graph_and_plan_equal_hugging_face(name: str, tmp_path: Path) -> None:
    theirs, path = tiny_models.save(name, tmp_path)
    tokens = tiny_models.text()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)[None]).logits[0].numpy()
    source = open_model(path)
    weights = {each: weight.numpy() for each, weight in source.weights.items()}
    source.close()
    graph = build_graph(source.config)
    made = plan(graph, Capacity(64, 64), Machine(threads=2))

    def by_graph(batch: ReferenceBatch, state: State) -> F32:
        return run_graph(graph, weights, batch, state)

    def by_plan(batch: ReferenceBatch, state: State) -> F32:
        return run_plan(made, weights, batch, state)

    assert np.abs(expected).max() > 1, "logits near zero would agree whatever the model did"
    for forward in (by_graph, by_plan):
        driver = Driver(forward, new_state(source.config))
        track = driver.add(tokens)
        logits = driver.step([(track, len(tokens))], every_token=True)
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)
    driver = Driver(by_plan, new_state(source.config))
    track, other = driver.add(tokens), driver.add(tokens[::-1])
    driver.step([(track, 13), (other, 20)])
    driver.step([(other, 1), (track, 26)])
    logits = driver.step([(track, 1)])
    np.testing.assert_allclose(logits[0], expected[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_rotary_tables_equal_torch(rope: RopeConfig) -> None:
    length = 300
    rng = np.random.default_rng(0)
    factors = rng.uniform(1, 8, rope.dim // 2).astype(np.float32)
    given = factors if rope.kind == "factors" else None
    theirs = torch_rotary.Rotary(
        rope, length, torch.device("cpu"), None if given is None else torch.tensor(given)
    )
    rotation = theirs.rotation(torch.arange(length), torch.float32)
    cosines, sines = rotary.rotary_tables(rope, length, given)
    assert cosines.dtype == sines.dtype == np.float32
    # The frequencies are the same; cosines of large angles differ between libraries.
    np.testing.assert_allclose(cosines, rotation.cos[:, 0, 0].numpy(), atol=1e-4)
    np.testing.assert_allclose(sines, rotation.sin[:, 0, 1].numpy(), atol=1e-4)


def test_missing_rope_factors_are_named() -> None:
    with pytest.raises(ModelFormatError, match="'rope.factors' weight of 16 values"):
        rotary.rotary_tables(RopeConfig(10000.0, 32, "factors"), 10)
