"""Families: their graphs need the weights of `architectures/`, and a new one is one file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.ir import families
from engine.backends.custom.ir.execute import Batch, State, run_graph, run_plan
from engine.backends.custom.ir.families import build_graph
from engine.backends.custom.ir.plan import Capacity, Machine
from engine.backends.custom.ir.planner import plan
from engine.backends.custom.ir.reference import F32
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture
from tests.ir_driver import CONFIGS, Driver, new_state, random_weights, text

# Norms with biases before gated halves whose activation is exact gelu: nobody's model.
MADE_UP = """
from engine.backends.custom.ir.families.decoder import DecoderBuilder, pre_norm_decoder


def attend(builder, x, layer):
    return builder.fused_qkv(x, layer)


def build(config):
    return pre_norm_decoder(config, attend, DecoderBuilder.gated_mlp)
"""


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_graphs_need_the_weights_of_the_architecture(config: ModelConfig) -> None:
    graph = build_graph(config)
    specs = architecture(config.family).tensors(config)
    wanted = {spec.name: spec.shape for spec in specs if not spec.optional}
    assert {name: value.shape for name, value in graph.weights.items()} == wanted


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "madeup.py").write_text(MADE_UP)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    config = replace(
        CONFIGS["qwen3"], family="madeup", norm="layer", activation="gelu", qkv_bias=True
    )
    graph = build_graph(config)
    weights = random_weights(graph)
    made = plan(graph, Capacity(16, 16), Machine(threads=2))

    def by_graph(batch: Batch, state: State) -> F32:
        return run_graph(graph, weights, batch, state)

    def by_plan(batch: Batch, state: State) -> F32:
        return run_plan(made, weights, batch, state)

    logits = []
    for forward in (by_graph, by_plan):
        driver = Driver(forward, new_state(config))
        track = driver.add(text(12))
        driver.step([(track, 7)])
        logits.append(driver.step([(track, 5)], every_token=True))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


@pytest.mark.parametrize("family", ["nobody", "bert", "..os", ""])
def test_a_family_without_a_graph_is_refused_by_name(family: str) -> None:
    with pytest.raises(ModelFormatError, match=f"'{family}'"):
        build_graph(replace(CONFIGS["llama"], family=family))
