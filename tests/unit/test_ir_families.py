"""Families: their graphs need the weights of `architectures/`, and any mix of parts is a graph."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.backends.custom.architectures.base import EncoderConfig, ModelConfig
from engine.backends.custom.ir.decoder import build_graph
from engine.backends.custom.ir.execute import ReferenceBatch, State, run_graph, run_plan
from engine.backends.custom.ir.graph import GraphError
from engine.backends.custom.ir.plan import Capacity, Machine
from engine.backends.custom.ir.planner import plan
from engine.backends.custom.ir.reference import F32
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture
from tests.ir_driver import CONFIGS, Driver, new_state, random_weights, text


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_graphs_need_the_weights_of_the_architecture(config: ModelConfig) -> None:
    graph = build_graph(config)
    specs = architecture(config.family).tensors(config)
    wanted = {spec.name: spec.shape for spec in specs if not spec.optional}
    assert {name: value.shape for name, value in graph.weights.items()} == wanted


# Nobody's models: parts of several families in one.
MIXES = {
    "gelu": {"norm": "layer", "activation": "gelu", "qkv_bias": True},
    "scaled": {"norm": "layer", "gated_mlp": False, "residual_multiplier": 0.3},
    "outputs": {"norm_placement": "output", "qk_norm": "head", "logits_scaling": 3.0},
    "positions": {"rope": None, "embedding_multiplier": 2.0, "qk_norm": "whole"},
}


@pytest.mark.parametrize("changes", MIXES.values(), ids=MIXES)
def test_parts_of_families_can_be_mixed(changes: dict[str, Any]) -> None:
    config = replace(CONFIGS["qwen3"], family="madeup", **changes)
    graph = build_graph(config)
    weights = random_weights(graph)
    made = plan(graph, Capacity(16, 16), Machine(threads=2))

    def by_graph(batch: ReferenceBatch, state: State) -> F32:
        return run_graph(graph, weights, batch, state)

    def by_plan(batch: ReferenceBatch, state: State) -> F32:
        return run_plan(made, weights, batch, state)

    logits = []
    for forward in (by_graph, by_plan):
        driver = Driver(forward, new_state(config))
        track = driver.add(text(12))
        driver.step([(track, 7)])
        logits.append(driver.step([(track, 5)], every_token=True))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


def test_encoders_have_no_graph() -> None:
    encoder = EncoderConfig(num_token_types=2, max_tokens=8)
    with pytest.raises(ModelFormatError, match="no graph for models of the family 'bert'"):
        build_graph(replace(CONFIGS["gpt2"], family="bert", encoder=encoder))


def test_what_no_step_does_is_refused_by_its_node() -> None:
    """A multiplier on a normed output: no family has it."""
    config = replace(CONFIGS["olmo2"], residual_multiplier=0.5)
    with pytest.raises(GraphError, match="layers.0.attn_norm: rms_norm: is part of no fusion"):
        plan(build_graph(config), Capacity(16, 16), Machine(threads=2))
