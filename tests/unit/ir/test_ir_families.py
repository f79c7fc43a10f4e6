"""Families: their graphs need the weights of `architectures/`, and any mix of parts is a graph."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.architectures.base import (
    EncoderConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture
from engine.ir.execute import ReferenceBatch, State, run_graph, run_plan
from engine.ir.graph import GraphError
from engine.ir.models.decoder import build_graph
from engine.ir.plan import Capacity, Machine
from engine.ir.planner import plan
from engine.ir.reference import F32
from tests.support.references.ir_driver import CONFIGS, Driver, new_state, random_weights, text


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_graph_weights_equal_the_architectures_tensors(config: ModelConfig) -> None:
    graph = build_graph(config)
    specs = architecture(config.family).tensors(config)
    wanted = {spec.name: spec.shape for spec in specs if not spec.optional}
    assert {name: value.shape for name, value in graph.weights.items()} == wanted


# Nobody's models: parts of several families in one.
MIXES = {
    "gelu": {"norm": "layer", "activation": "gelu", "qkv_bias": True},
    "scaled": {"norm": "layer", "gated_mlp": False, "residual_multiplier": 0.3},
    "outputs": {"norm_placement": "output", "qk_norm": "head", "logits_scaling": 3.0},
    "both": {"norm_placement": "both", "activation": "gelu_tanh", "logits_softcap": 2.0},
    "capped": {"attention_softcap": 1.5, "logits_softcap": 2.0, "logits_scaling": 0.5},
    "sinks": {"attention_sinks": True, "sliding_window": 5},
    "alibi": {"rope": None, "alibi_bias": 8.0, "norm": "layer"},
    "parallel": {"parallel": "shared", "norm": "layer", "logits_scaling": 0.5},
    "parallel own": {"parallel": "own", "norm": "layer", "norm_bias": True, "mlp_bias": True},
    "relu2": {"activation": "relu2", "gated_mlp": False},
    "layers": {
        "layers": (
            LayerConfig(5, RopeConfig(10000.0, 12), experts=False),
            LayerConfig(None, None, experts=False),
        )
    },
    "ropes": {
        "num_layers": 3,
        "layers": (
            LayerConfig(5, RopeConfig(10000.0, 12), experts=False),
            LayerConfig(None, RopeConfig(500.0, 8), experts=False),
            LayerConfig(5, RopeConfig(10000.0, 12), experts=False),
        ),
    },
    "experts": {"experts": ExpertsConfig(6, 2, 24, renormalizes=True)},
    "shared expert": {
        "experts": ExpertsConfig(6, 2, 24, shared_size=20, shared_gate=True),
        "residual_multiplier": 0.3,
    },
    "gpt-oss experts": {
        "experts": ExpertsConfig(6, 2, 24, "softmax_chosen", router_bias=True, bias=True),
        "activation": "swiglu_oai",
    },
    "grouped experts": {
        "experts": ExpertsConfig(
            8, 3, 24, "sigmoid", True, 2.5, 4, 2, "best_two", correction=True, shared_size=20
        ),
        "layers": (
            LayerConfig(None, RopeConfig(10000.0, 12), experts=False),
            LayerConfig(None, RopeConfig(10000.0, 12), experts=True),
        ),
    },
    "normed experts": {
        "experts": ExpertsConfig(6, 2, 24, renormalizes=True),
        "norm_placement": "both",
    },
    "latent": {
        "num_kv_heads": 1,
        "head_dim": 30,
        "qk_norm": None,
        "rope": RopeConfig(10000.0, 8),
        "latent": LatentConfig(22, None, 10, 8, 14),
    },
    "latent of queries": {
        "num_kv_heads": 1,
        "head_dim": 40,
        "qk_norm": None,
        "rope": RopeConfig(10000.0, 8),
        "latent": LatentConfig(32, 20, 10, 8, 14),
        "experts": ExpertsConfig(6, 2, 24, renormalizes=True),
    },
    "positions": {"rope": None, "embedding_multiplier": 2.0, "qk_norm": "whole"},
}


@pytest.mark.parametrize("changes", MIXES.values(), ids=MIXES)
def test_features_of_different_families_can_be_combined_in_a_graph(changes: dict[str, Any]) -> None:
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


def test_a_node_that_no_plan_step_computes_is_refused() -> None:
    """A multiplier on a normed output: no family has it."""
    config = replace(CONFIGS["olmo2"], residual_multiplier=0.5)
    with pytest.raises(GraphError, match="layers.0.attn_scaled: scale: is part of no fusion"):
        plan(build_graph(config), Capacity(16, 16), Machine(threads=2))
