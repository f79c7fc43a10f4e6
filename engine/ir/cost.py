"""Estimates the bytes and FLOPs of each plan step, for an engine step of a given size."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.ir import plan as ir
from engine.ir.steps import weights_of
from engine.ir.types import Counts

_FLOAT = 4
# A function that returns the stored size of a weight in bytes, by the weight's name.
StoredBytes = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class StepCost:
    flops: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    def __add__(self, other: "StepCost") -> "StepCost":
        return StepCost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_bytes + other.kv_bytes,
        )


class PlanCost:
    """Estimates the cost of each plan step. `kv_value_bytes` is the size of one value in the KV
    cache.
    """

    def __init__(
        self, plan: ir.ExecutionPlan, stored_bytes: StoredBytes, kv_value_bytes: float
    ) -> None:
        self._plan = plan
        self._stored_bytes = stored_bytes
        self._kv_value_bytes = kv_value_bytes
        self._matrices = {matrix.name: matrix for matrix in plan.matrices}

    def steps(self, counts: Counts) -> tuple[StepCost, ...]:
        return tuple(self.step(step, counts) for step in self._plan.steps)

    def total(self, counts: Counts) -> StepCost:
        return sum(self.steps(counts), StepCost())

    def step(self, step: ir.Step, counts: Counts) -> StepCost:
        match step:
            case ir.EmbedStep():
                return self._embed(step, counts)
            case ir.LinearStep():
                return self._linear(step, counts)
            case ir.RopeWriteStep():
                return self._rope_write(step, counts)
            case ir.AttentionStep():
                return self._attention(step, counts)
            case ir.LatentWriteStep():
                size = counts.tokens * self._plan.buffers[step.source].width
                stored = round(size * self._kv_value_bytes)
                return StepCost(5 * size, activation_bytes=2 * _FLOAT * size, kv_bytes=stored)
            case ir.HeadLinearStep():
                return self._head_linear(step, counts)
            case ir.NormStep() | ir.RouteStep() | ir.GateRowsStep():
                return self._elementwise(step, counts)
            case ir.ExpertsStep():
                return self._experts(step, counts)
            case ir.RecurrentStep():
                return self._recurrent(step, counts)
            case ir.GatherStep():
                size = counts.logits * self._plan.buffers[step.out].width
                return StepCost(activation_bytes=2 * _FLOAT * size)
            case ir.MeanStep():
                size = counts.tokens * self._plan.buffers[step.out].width
                return StepCost(flops=size, activation_bytes=_FLOAT * size)

    def weights(self, step: ir.Step) -> tuple[str, ...]:
        """Names of the weights that a plan step reads."""
        return weights_of(step, self._matrices)

    def _embed(self, step: ir.EmbedStep, counts: Counts) -> StepCost:
        """The cost of an embedding lookup. Only the table rows of the step's tokens are read."""
        matrix = self._matrices[step.table]
        row = self._stored_bytes(step.table) / matrix.rows
        size = counts.tokens * matrix.columns
        added = size * ((step.positions is not None) + (step.types is not None))
        return StepCost(
            flops=added,
            weight_bytes=round(row * counts.tokens) + _FLOAT * added,
            activation_bytes=_FLOAT * size,
        )

    def _linear(self, step: ir.LinearStep, counts: Counts) -> StepCost:
        matrix = self._matrices[step.matrix]
        rows = self._num_rows(step.source, counts)
        written = matrix.rows // 2 if step.gated else matrix.rows
        touched = matrix.columns + written * (2 if step.residual or step.multiply else 1)
        return StepCost(
            flops=2 * rows * matrix.rows * matrix.columns,
            weight_bytes=sum(map(self._stored_bytes, self.weights(step))) if rows else 0,
            activation_bytes=_FLOAT * rows * touched,
        )

    def _head_linear(self, step: ir.HeadLinearStep, counts: Counts) -> StepCost:
        matrix = self._matrices[step.matrix]
        rows = self._num_rows(step.source, counts)
        touched = self._plan.buffers[step.source].width + self._plan.buffers[step.out].width
        return StepCost(
            flops=2 * rows * step.heads * matrix.rows * matrix.columns,
            weight_bytes=sum(map(self._stored_bytes, self.weights(step))) if rows else 0,
            activation_bytes=_FLOAT * rows * touched,
        )

    def _num_rows(self, buffer: int, counts: Counts) -> int:
        return counts.tokens if self._plan.buffers[buffer].per == "token" else counts.logits

    def _elementwise(
        self, step: ir.NormStep | ir.RouteStep | ir.GateRowsStep, counts: Counts
    ) -> StepCost:
        size = self._num_rows(step.out, counts) * self._plan.buffers[step.out].width
        return StepCost(
            flops=5 * size,
            weight_bytes=sum(map(self._stored_bytes, self.weights(step))) if size else 0,
            activation_bytes=3 * _FLOAT * size,
        )

    def _experts(self, step: ir.ExpertsStep, counts: Counts) -> StepCost:
        """The cost of experts. If tokens choose at random, this share of the experts is read."""
        rows = self._num_rows(step.source, counts)
        read = 1 - (1 - step.per_token / step.num_experts) ** rows
        up, down = self._matrices[step.up], self._matrices[step.down]
        chosen = rows * step.per_token
        return StepCost(
            flops=2 * chosen * (up.rows * up.columns + down.rows * down.columns),
            weight_bytes=round(read * sum(map(self._stored_bytes, self.weights(step)))),
            activation_bytes=_FLOAT * chosen * 2 * (up.columns + down.columns),
        )

    def _recurrent(self, step: ir.RecurrentStep, counts: Counts) -> StepCost:
        """The cost of a layer with a state. States count as keys and values do."""
        sizes, state = step.recurrence.sizes, step.recurrence.state
        flops = 2 * sizes.channels * state.conv_size + 6 * sizes.out * state.state_size
        return StepCost(
            flops=counts.tokens * flops,
            weight_bytes=sum(map(self._stored_bytes, self.weights(step))),
            activation_bytes=_FLOAT * counts.tokens * (sizes.projected + sizes.out),
            kv_bytes=2 * _FLOAT * counts.sequences * sizes.state,
        )

    def _rope_write(self, step: ir.RopeWriteStep, counts: Counts) -> StepCost:
        turned, stored = step.heads + step.kv_heads, 2 * step.kv_heads
        return StepCost(
            flops=3 * counts.tokens * turned * step.rope_dim,
            activation_bytes=2 * _FLOAT * counts.tokens * turned * step.head_dim,
            kv_bytes=round(counts.tokens * stored * step.head_dim * self._kv_value_bytes),
        )

    def _attention(self, step: ir.AttentionStep, counts: Counts) -> StepCost:
        seen = min(counts.context, step.window or counts.context)
        parts = 1 if step.latent else 2
        known = parts * counts.sequences * seen * step.kv_heads * step.head_dim
        width = step.heads * (step.head_dim + (step.latent or step.head_dim))
        return StepCost(
            flops=2 * counts.tokens * seen * width,
            activation_bytes=_FLOAT * counts.tokens * width,
            kv_bytes=round(known * self._kv_value_bytes),
        )
