"""Layer outputs and layer times of the native framework, for `tools/inspection.py`.

Times are measured with the kernels. Outputs are computed with the numpy references from the unfused
graph instead, because fused kernels do not expose their intermediate values.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.ir.execute import ReferenceBatch, State, graph_values
from engine.ir.models.decoder import build_graph
from engine.ir.plan import (
    AttentionStep,
    EmbedStep,
    ExpertsStep,
    GateRowsStep,
    HeadLinearStep,
    LatentWriteStep,
    LinearStep,
    NormStep,
    RecurrentStep,
    RopeWriteStep,
    RouteStep,
    Step,
)
from engine.ir.recurrent import empty_states
from engine.ir.rotary import rotary_tables
from engine.ir.steps import layer_of
from engine.ir.types import Array
from engine.native.execution import build
from engine.native.execution.timing import runner_config, time_steps
from engine.native.machine import default_threads
from engine.weights.model import ModelSource

# The name of an output in the report -> the graph nodes of a layer whose sum it is. A layer has
# either an MLP, or experts and perhaps a shared expert.
_NODES = {
    "attn": ("attn.o", "mixer.o"),
    "mlp": ("mlp.down", "experts", "shared.down"),
    "out": ("mlp_sum",),
}


class _Reference:
    """The unfused graph of a model, computed with the numpy references and dequantized weights."""

    def __init__(self, source: ModelSource) -> None:
        self.graph = build_graph(source.config)
        self._config = source.config
        self._weights = {name: weight.numpy() for name, weight in source.weights.items()}

    def values(self, token_ids: Sequence[int]) -> dict[str, Array]:
        """The values of all nodes for one sequence."""
        config, count = self._config, len(token_ids)
        positions = np.arange(count, dtype=np.int32)
        cache = (1, count, config.kv_parts, config.num_kv_heads, config.head_dim)
        factors = self._weights.get("rope.factors")
        rotations = tuple(
            rotary_tables(rope, config.max_position, factors) for rope in config.ropes
        )
        state = State(
            tuple(np.zeros(cache, np.float32) for _ in range(config.num_layers)),
            rotations,
            empty_states(config, 1),
        )
        zeros = np.zeros(count, np.int32)
        batch = ReferenceBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            write_slots=positions.astype(np.int64),
            row_of=zeros,
            tables=np.zeros((1, 1), np.int32),
            logit_tokens=positions,  # or the last layer would leave tokens out
            slots=zeros[:1],
        )
        return graph_values(self.graph, self._weights, batch, state)


def layer_outputs(source: ModelSource, token_ids: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    config = source.config
    values = _Reference(source).values(token_ids)
    found = {"embed": values["embed_sum" if config.learned_positions else "embed"]}
    for layer in range(config.num_layers):
        for site, nodes in _NODES.items():
            names = [f"layers.{layer}.{node}" for node in nodes]
            parts = [values[name] for name in names if name in values]
            if parts:
                found[f"layers.{layer}.{site}"] = np.sum(parts, axis=0)
    return found | {"logits": values["logits"]}


class SquaredInputs:
    """Sums the squares of what the matrices of a model are multiplied with. The LM head is left
    out, because it has more bits in every mix of types, and so are experts.
    """

    def __init__(self, source: ModelSource) -> None:
        self._reference = _Reference(source)
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._num_tokens = 0

    def add(self, window: Sequence[int]) -> None:
        values = self._reference.values(window)
        for node in self._reference.graph.nodes:
            if node.op == "linear" and node.name.startswith("layers."):
                squares = np.square(values[node.inputs[0]], dtype=np.float64).sum(axis=0)
                name = node.weights[0]
                self._sums[name] = self._sums.get(name, np.zeros_like(squares)) + squares
        self._num_tokens += len(window)

    def sums(self) -> dict[str, tuple[NDArray[np.float32], int]]:
        """By the engine's name of a weight: the sum of squares of each input column, and the number
        of tokens.
        """
        return {
            name: (squares.astype(np.float32), self._num_tokens)
            for name, squares in self._sums.items()
        }


def layer_times(source: ModelSource, num_tokens: int, repeats: int) -> dict[str, float]:
    """Seconds of each part of the model in a forward pass over `num_tokens` prefill tokens. The
    times of "attn" and "mlp" are means over all layers.

    Norms are fused into the matmuls that follow them, so they have no times of their own. `repeats`
    is ignored, because `time_steps` decides how often to repeat the forward pass.
    """
    config = replace(runner_config(num_tokens, 1, num_tokens), dtype="float32")
    machine = build.machine_with(config.num_threads or default_threads())
    plan = build.plans_for(source, config, machine)[0]
    times = time_steps(source, config, num_tokens, is_prompt=True)
    sums: dict[str, float] = defaultdict(float)
    for step, seconds in zip(plan.steps, times.steps, strict=True):
        sums[_layer(step)] += seconds
    return {
        name: seconds / (source.config.num_layers if name in ("attn", "mlp") else 1)
        for name, seconds in sums.items()
    }


def _layer(step: Step) -> str:
    match step:
        case EmbedStep():
            return "embed"
        case RopeWriteStep() | LatentWriteStep() | HeadLinearStep() | AttentionStep():
            return "attn"
        case RecurrentStep():
            return "attn"
        case LinearStep() if layer_of(step.matrix) is not None:
            return "attn" if ".attn." in step.matrix or ".mixer." in step.matrix else "mlp"
        case NormStep():
            return "attn" if ".attn" in step.norm.weight else "mlp"
        case RouteStep() | ExpertsStep() | GateRowsStep():
            return "mlp"
        case _:
            return "head"
