"""Runs plans and graphs in numpy over a paged KV cache. Tests compare other executors with this
one.

The plan executor puts buffers where the plan says, so it also tests the plan's memory assignment.
It first fills the memory with NaN. If a buffer is read before it is written, the result has NaN. If
a buffer is overwritten while it is still needed, the result is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.ir import plan as ir
from engine.ir import recurrent, reference
from engine.ir.graph import Graph
from engine.ir.models import inputs as graph_inputs
from engine.ir.ops import OPS
from engine.ir.reference import F32, I32, Integers
from engine.ir.types import Array

Weights = Mapping[str, F32]


@dataclass(frozen=True, slots=True)
class ReferenceBatch:
    """The tokens of one step, in any order. Of a sequence, they may be a whole prompt, a chunk of
    it, or a decode token.
    """

    token_ids: I32  # (T,)
    positions: I32  # (T,)
    write_slots: Integers  # (T,) block * block_size + offset
    row_of: I32  # (T,) index of the token's sequence
    tables: I32  # (S, B) block table of each sequence
    logit_tokens: I32  # (R,) indices of the tokens whose logits are needed
    # (S,) each sequence's index into the arrays of states; None if no layer keeps a state
    slots: I32 | None = None
    # Only for encoders: (T,) the token attends to positions below this; (T,) its type
    visible_end: I32 | None = None
    token_types: I32 | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What is kept between steps: the KV cache, states of sequences, and the RoPE tables."""

    caches: tuple[F32, ...]  # by layer: (C, P, 2, K, H), or (C, P, 1, 1, H) without values
    # By index in `ModelConfig.ropes`: cosines and sines, (positions, dim / 2) each
    rotations: tuple[tuple[F32, F32], ...] = ()
    states: tuple[F32, ...] = ()  # by layer with a state: (slots, floats)

    def rotations_at(self, positions: I32) -> tuple[tuple[F32, F32], ...]:
        return tuple((cosines[positions], sines[positions]) for cosines, sines in self.rotations)


def run_graph(graph: Graph, weights: Weights, batch: ReferenceBatch, state: State) -> F32:
    """Computes the nodes of a graph in order, with the numpy references. Returns the graph's first
    output.
    """
    return graph_values(graph, weights, batch, state)[graph.outputs[0]]


def graph_values(
    graph: Graph, weights: Weights, batch: ReferenceBatch, state: State
) -> dict[str, Array]:
    """The values of all graph inputs and all nodes, by name."""
    values: dict[str, Array] = {
        graph_inputs.TOKEN_IDS: batch.token_ids,
        graph_inputs.POSITIONS: batch.positions,
        graph_inputs.WRITE_SLOTS: batch.write_slots,
        graph_inputs.ROW_OF: batch.row_of,
        graph_inputs.TABLES: batch.tables,
        graph_inputs.LOGIT_TOKENS: batch.logit_tokens,
        graph_inputs.TOKEN_TYPES: _types(batch),
    }
    if batch.visible_end is not None:
        values[graph_inputs.VISIBLE_END] = batch.visible_end
    for table, rotations in enumerate(state.rotations_at(batch.positions)):
        values.update(zip(graph_inputs.rotation_names(table), rotations, strict=True))
    if batch.slots is not None:
        values[graph_inputs.SLOTS] = batch.slots
    values.update((graph_inputs.cache_name(i), cache) for i, cache in enumerate(state.caches))
    names = [name for name in graph.inputs if name.startswith(graph_inputs.state_name(""))]
    values.update(zip(names, state.states, strict=True))
    for node in graph.nodes:
        values[node.name] = OPS[node.op].reference(
            node.attributes,
            [values[name] for name in node.inputs],
            [weights[name] for name in node.weights],
        )
    return values


def run_plan(plan: ir.ExecutionPlan, weights: Weights, batch: ReferenceBatch, state: State) -> F32:
    """Executes the plan steps in order. Returns a copy of the output, the logits (R, V)."""
    run = _Run(plan, weights, batch, state)
    for step in plan.steps:
        match step:
            case ir.EmbedStep():
                run.embed(step)
            case ir.LinearStep():
                run.linear(step)
            case ir.RopeWriteStep():
                run.rope_write(step)
            case ir.LatentWriteStep():
                run.latent_write(step)
            case ir.HeadLinearStep():
                run.head_linear(step)
            case ir.AttentionStep():
                run.attention(step)
            case ir.NormStep():
                run.norm(step)
            case ir.RouteStep():
                run.route(step)
            case ir.ExpertsStep():
                run.experts(step)
            case ir.RecurrentStep():
                run.recurrent(step)
            case ir.GateRowsStep():
                run.buffers[step.out][:] *= reference.sigmoid(run.buffers[step.source])
            case ir.GatherStep():
                run.buffers[step.out][:] = run.buffers[step.source][batch.logit_tokens]
            case ir.MeanStep():
                states = run.buffers[step.source]
                run.buffers[step.out][:] = reference.mean_rows(states, batch.logit_tokens)
    return run.buffers[plan.output].copy()


def _types(batch: ReferenceBatch) -> I32:
    return np.zeros_like(batch.token_ids) if batch.token_types is None else batch.token_types


class _Run:
    """One execution of a plan: memory for the buffers, and a method for each kind of plan step."""

    def __init__(
        self, plan: ir.ExecutionPlan, weights: Weights, batch: ReferenceBatch, state: State
    ) -> None:
        counts = {"token": len(batch.token_ids), "logit": len(batch.logit_tokens)}
        room = {"token": plan.capacity.tokens, "logit": plan.capacity.logits}
        if any(counts[kind] > room[kind] for kind in room):
            raise ValueError(f"a step of {counts} rows exceeds the plan's {plan.capacity}")
        kinds = {buffer.place: buffer.per for buffer in plan.buffers}
        arena = [
            np.full((counts[kinds[place]], width), np.nan, np.float32)
            for place, width in enumerate(plan.places)
        ]
        self.buffers = [arena[buffer.place][:, : buffer.width] for buffer in plan.buffers]
        self._matrices = {matrix.name: matrix for matrix in plan.matrices}
        self._weights, self._batch, self._state = weights, batch, state
        self._rotations = state.rotations_at(batch.positions)

    def embed(self, step: ir.EmbedStep) -> None:
        (table,) = self._matrices[step.table].parts
        rows = reference.embed(self._weights[table], self._batch.token_ids)
        rows = rows * np.float32(step.scale)
        if step.positions is not None:
            rows = rows + reference.embed(self._weights[step.positions], self._batch.positions)
        if step.types is not None:
            rows = rows + reference.embed(self._weights[step.types], _types(self._batch))
        self.buffers[step.out][:] = rows

    def linear(self, step: ir.LinearStep) -> None:
        matrix = self._matrices[step.matrix]
        x = self._normed(self.buffers[step.source], step.norm)
        parts = [self._weights[name] for name in matrix.parts]
        biases = [self._weights[name] for name in matrix.biases] if step.has_bias else []
        matmul = reference.projection(x, parts, biases, step.activation, step.gated)
        matmul = matmul * np.float32(step.scale)
        matmul = matmul if step.softcap is None else reference.softcap(matmul, step.softcap)
        out = self.buffers[step.out][:, step.column : step.column + matmul.shape[1]]
        if step.residual:
            out += matmul
        elif step.multiply:
            out *= matmul
        else:
            out[:] = matmul

    def norm(self, step: ir.NormStep) -> None:
        normed = self._normed(self.buffers[step.source], step.norm)
        out = self.buffers[step.out]
        out[:] = out + normed if step.residual else normed

    def route(self, step: ir.RouteStep) -> None:
        correction = None if step.correction is None else self._weights[step.correction]
        logits = self.buffers[step.source]
        self.buffers[step.out][:] = reference.route(logits, step.routing, correction)

    def experts(self, step: ir.ExpertsStep) -> None:
        both = (self._matrices[step.up], self._matrices[step.down])
        matrices = [self._weights[name] for matrix in both for name in matrix.parts]
        biases = [self._weights[name] for matrix in both for name in matrix.biases]
        x, weights = self.buffers[step.source], self.buffers[step.weights]
        total = reference.experts(x, weights, matrices, biases, step.activation)
        total = total * np.float32(step.scale)
        out = self.buffers[step.out]
        out[:] = out + total if step.residual else total

    def recurrent(self, step: ir.RecurrentStep) -> None:
        batch, states = self._batch, self._state.states[step.recurrence.layer]
        assert batch.slots is not None, step
        source, weights = self.buffers[step.source], [self._weights[name] for name in step.weights]
        inputs = (source, states, batch.positions, batch.row_of, batch.slots)
        self.buffers[step.out][:] = recurrent.compute(step.recurrence, inputs, weights)
        source[:] = np.nan  # a kernel may overwrite it

    def rope_write(self, step: ir.RopeWriteStep) -> None:
        norms = [
            None if name is None else self._weights[name] for name in (step.q_norm, step.k_norm)
        ]
        qkv = self.buffers[step.qkv]
        qkv[:] = reference.rope_write(
            qkv,
            step.heads,
            self._state.caches[step.layer],
            self._batch.write_slots,
            self._rotations[step.table] if step.rope_dim else None,
            (norms[0], norms[1]),
            step.eps,
        )

    def latent_write(self, step: ir.LatentWriteStep) -> None:
        cache, slots = self._state.caches[step.layer], self._batch.write_slots
        x, norm = self.buffers[step.source], self._weights[step.norm]
        reference.latent_write(x, norm, step.eps, self._rotations[step.table], cache, slots)

    def head_linear(self, step: ir.HeadLinearStep) -> None:
        (name,) = self._matrices[step.matrix].parts
        rotations = self._rotations[step.table] if step.rope_dim else None
        self.buffers[step.out][:] = reference.head_linear(
            self.buffers[step.source], self._weights[name], rotations
        )

    def attention(self, step: ir.AttentionStep) -> None:
        slopes = None
        if step.alibi_bias is not None:
            slopes = reference.alibi_slopes(step.heads, step.alibi_bias)
        sinks = None if step.sinks is None else self._weights[step.sinks]
        self.buffers[step.out][:] = reference.paged_attention(
            self.buffers[step.qkv][:, : step.heads * step.head_dim],
            self._state.caches[step.layer],
            self._batch.positions,
            self._batch.row_of,
            self._batch.tables,
            step.scale,
            step.window,
            reference.ScoreRules(step.softcap, slopes, sinks, step.centered),
            self._batch.visible_end,
            step.latent,
        )

    def _normed(self, x: F32, norm: ir.Norm | None) -> F32:
        if norm is None:
            return x
        weight = self._weights[norm.weight]
        if norm.kind == "rms":
            return reference.rms_norm(x, weight, norm.eps)
        bias = None if norm.bias is None else self._weights[norm.bias]
        return reference.layer_norm(x, weight, bias, norm.eps)
