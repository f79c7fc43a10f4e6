"""Lowers a fused graph to plan steps, which read and write numbered buffers. Afterwards,
`liveness.py` assigns memory to the buffers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from engine.core.errors import ModelFormatError
from engine.ir import plan as ir
from engine.ir.attributes import (
    AttentionAttributes,
    Experts,
    HeadLinear,
    LatentWrite,
    Projection,
    RopeWrite,
)
from engine.ir.choice import attention_kernel, matmul_kernel, split
from engine.ir.fusion import as_projection
from engine.ir.graph import Graph, GraphError, Node, joined_name
from engine.ir.liveness import ArenaPlace
from engine.ir.recurrent import OP_NAMES

# A function that returns the layout in which kernels read a weight, by the weight's name.
LayoutOf = Callable[[str], str]

_KINDS: dict[str, ir.RowKind] = {"T": "token", "R": "logit"}


@dataclass
class Lowering:
    """Lowers a graph node by node. After `run`, `steps` has the plan steps. `names` and `rooms`
    describe the buffers. `matrices` and `vectors` are the weights that the plan steps read.
    """

    graph: Graph
    capacity: ir.Capacity
    machine: ir.Machine
    precision: ir.Precision
    layout_of: LayoutOf
    steps: list[ir.Step] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # buffer names
    rooms: list[ArenaPlace] = field(default_factory=list)
    buffer_of: dict[str, int] = field(default_factory=dict)  # value name -> buffer
    matrices: dict[str, ir.PackedMatrix] = field(default_factory=dict)
    vectors: dict[str, None] = field(default_factory=dict)

    def run(self) -> None:
        lower = {
            "embed": self._embed,
            "embed_positions": self._embed,
            "linear": self._matmul,
            "projection": self._matmul,
            "rope_write": self._rope_write,
            "latent_write": self._latent_write,
            "head_linear": self._head_linear,
            "attention": self._attention,
            "rms_norm": self._standalone_norm,
            "layer_norm": self._standalone_norm,
            "add_norm": self._standalone_norm,
            "route": self._route,
            "experts": self._experts,
            "gate_rows": self._gate_rows,
            **dict.fromkeys(OP_NAMES.values(), self._recurrent),
            "gather_rows": self._gather,
            "mean_rows": self._mean,
        }
        for node in self.graph.nodes:
            if node.op not in lower:
                raise GraphError(node.name, f"{node.op}: is part of no fusion, and no step does it")
            lower[node.op](node)

    def _embed(self, node: Node) -> None:
        table = self._matrix(node.weights[:1], (), interleaved=False)
        more = [self._vector(name) for name in node.weights[1:]]
        types = more.pop() if node.attributes.types else None
        num_types = 0 if types is None else int(self.graph.weights[types].shape[0])
        positions = more[0] if more else None
        scale: float = node.attributes.scale
        out = self._new_buffer(node)
        self.steps.append(
            ir.EmbedStep(node.origin, out, table.name, positions, scale, types, num_types)
        )

    def _gather(self, node: Node) -> None:
        source = self._buffer(node, 0)
        self.steps.append(ir.GatherStep(node.origin, source, self._new_buffer(node)))

    def _mean(self, node: Node) -> None:
        source = self._buffer(node, 0)
        self.steps.append(ir.MeanStep(node.origin, source, self._new_buffer(node)))

    def _standalone_norm(self, node: Node) -> None:
        """Lowers a norm that is not fused into a matmul. `add_norm` adds to its second input."""
        source, residual = self._buffer(node, 0), node.op == "add_norm"
        if residual:
            out = self.buffer_of[node.name] = self._buffer(node, 1)
        else:
            out = self._new_buffer(node)
        names = [self._vector(name) for name in node.weights]
        bias = names[1] if len(names) > 1 else None
        kind: Literal["rms", "layer"] = "layer" if node.op == "layer_norm" else "rms"
        norm = ir.Norm(kind, names[0], bias, node.attributes.eps)
        self.steps.append(ir.NormStep(node.origin, source, out, norm, residual))

    def _route(self, node: Node) -> None:
        source = self._buffer(node, 0)
        correction = self._vector(node.weights[0]) if node.weights else None
        out = self._new_buffer(node)
        experts, routing = self.rooms[out].width, node.attributes
        self.steps.append(ir.RouteStep(node.origin, source, out, experts, routing, correction))

    def _recurrent(self, node: Node) -> None:
        self._check_private(node)
        source, out = self._buffer(node, 0), self._new_buffer(node)
        weights = tuple(map(self._vector, node.weights))
        self.steps.append(ir.RecurrentStep(node.origin, source, out, node.attributes, weights))

    def _check_private(self, node: Node) -> None:
        """Checks that no other node reads the first input of `node`, which its step changes."""
        name = node.inputs[0]
        if sum(name in each.inputs for each in self.graph.nodes) > 1:
            raise GraphError(node.name, f"{node.op}: changes '{name}', which other nodes read too")

    def _gate_rows(self, node: Node) -> None:
        self._check_private(node)
        out = self.buffer_of[node.name] = self._buffer(node, 0)
        self.steps.append(ir.GateRowsStep(node.origin, self._buffer(node, 1), out))

    def _experts(self, node: Node) -> None:
        attributes: Experts = node.attributes
        source, weights = self._buffer(node, 0), self._buffer(node, 1)
        if attributes.residual:
            out = self.buffer_of[node.name] = self._buffer(node, 2)
        else:
            out = self._new_buffer(node)
        parts, biases = node.weights[:3], node.weights[3:]
        layouts = [self.layout_of(part) for part in parts[:2]]
        if layouts[0] != layouts[1]:
            raise ModelFormatError(
                f"'{parts[0]}' is stored as {layouts[0]} and '{parts[1]}' as {layouts[1]}, but the "
                "native kernels need one type for both; convert the model: engine convert --type"
            )
        up = self._matrix(parts[:2], biases[:2], interleaved=True)
        down = self._matrix(parts[2:], biases[2:], interleaved=False)
        few_rows = self.rooms[source].per == "logit"
        kernels = [
            matmul_kernel(matrix.layout, self.machine, self.precision, few_rows)
            for matrix in (up, down)
        ]
        self.steps.append(
            ir.ExpertsStep(
                node.origin,
                source,
                weights,
                out,
                up.experts,
                attributes.per_token,
                up.name,
                down.name,
                attributes.activation,
                attributes.has_bias,
                attributes.residual,
                attributes.scale,
                up_kernel=kernels[0],
                down_kernel=kernels[1],
            )
        )

    def _rope_write(self, node: Node) -> None:
        attributes: RopeWrite = node.attributes
        norms = [self._vector(name) for name in node.weights]
        qkv = self.buffer_of[node.name] = self._buffer(node, 0)
        self.steps.append(
            ir.RopeWriteStep(
                node.origin,
                qkv,
                attributes.layer,
                attributes.heads,
                attributes.kv_heads,
                attributes.head_dim,
                attributes.rope_dim,
                q_norm=norms[0] if attributes.q_norm else None,
                k_norm=norms[-1] if attributes.k_norm else None,
                eps=attributes.eps,
                whole_norm=attributes.whole_norm,
                table=attributes.table,
            )
        )

    def _latent_write(self, node: Node) -> None:
        attributes: LatentWrite = node.attributes
        self.steps.append(
            ir.LatentWriteStep(
                node.origin,
                self._buffer(node, 0),
                attributes.layer,
                attributes.rope_dim,
                self._vector(node.weights[0]),
                attributes.eps,
                attributes.table,
            )
        )

    def _head_linear(self, node: Node) -> None:
        attributes: HeadLinear = node.attributes
        source = self._buffer(node, 0)
        matrix = self._matrix(node.weights, (), interleaved=False)
        few_rows = self.rooms[source].per == "logit"
        self.steps.append(
            ir.HeadLinearStep(
                node.origin,
                source,
                self._new_buffer(node),
                matrix.name,
                attributes.heads,
                matmul_kernel(matrix.layout, self.machine, self.precision, few_rows),
                attributes.rope_dim,
                attributes.table,
            )
        )

    def _attention(self, node: Node) -> None:
        attributes: AttentionAttributes = node.attributes
        self.steps.append(
            ir.AttentionStep(
                node.origin,
                self._buffer(node, 0),
                self._new_buffer(node),
                attributes.layer,
                attributes.heads,
                attributes.kv_heads,
                attributes.head_dim,
                attributes.scale,
                attributes.window,
                attention_kernel(self.machine, self.precision, attributes.latent > 0),
                attributes.softcap,
                attributes.alibi_bias,
                self._vector(node.weights[0]) if attributes.sinks else None,
                attributes.centered,
                attributes.latent,
            )
        )

    def _matmul(self, node: Node) -> None:
        attributes = as_projection(node)
        source = self._buffer(node, 0)
        if attributes.residual:
            out = self.buffer_of[node.name] = self._buffer(node, 1)
        else:
            out = self._new_buffer(node)
        count, norms = attributes.parts, attributes.norm_weights
        parts = node.weights[norms : norms + count]
        biases = node.weights[norms + count :]
        norm = self._norm(node, attributes)
        runs = self._runs(parts)
        if attributes.gated and len(runs) > 1:
            self._split_gate(node, source, out, norm, attributes)
            return
        column = 0
        for run in runs:
            matrix = self._matrix(
                parts[run.start : run.stop], biases[run.start : run.stop], attributes.gated
            )
            self._linear(node, source, out, norm, matrix, attributes, column=column)
            column += matrix.rows

    def _split_gate(
        self, node: Node, source: int, out: int, norm: ir.Norm | None, attributes: Projection
    ) -> None:
        """Lowers a gated matmul to two plan steps. This is for gate and up matrices of different
        layouts, which cannot be packed into one matrix.
        """
        norms = attributes.norm_weights
        for index, activation in enumerate((attributes.activation, "none")):
            bias = norms + 2 + index
            matrix = self._matrix(
                node.weights[norms + index : norms + index + 1],
                node.weights[bias : bias + 1],
                interleaved=False,
            )
            single = Projection(has_bias=attributes.has_bias, activation=activation)
            self._linear(node, source, out, norm, matrix, single, multiply=index == 1)

    def _linear(
        self,
        node: Node,
        source: int,
        out: int,
        norm: ir.Norm | None,
        matrix: ir.PackedMatrix,
        attributes: Projection,
        column: int = 0,
        multiply: bool = False,
    ) -> None:
        per = self.rooms[source].per
        rows = self.capacity.tokens if per == "token" else self.capacity.logits
        self.steps.append(
            ir.LinearStep(
                node.origin,
                source,
                out,
                norm,
                matrix.name,
                attributes.activation,
                attributes.gated,
                attributes.residual,
                attributes.has_bias,
                matmul_kernel(matrix.layout, self.machine, self.precision, per == "logit"),
                split(matrix, attributes.gated, rows, self.machine),
                column,
                multiply,
                attributes.scale,
                attributes.softcap,
            )
        )

    def _runs(self, parts: Sequence[str]) -> list[range]:
        """Groups neighbouring weights of the same layout. Each group can become one matrix."""
        found = []
        for _, group in groupby(range(len(parts)), key=lambda each: self.layout_of(parts[each])):
            indices = list(group)
            found.append(range(indices[0], indices[-1] + 1))
        return found

    def _norm(self, node: Node, attributes: Projection) -> ir.Norm | None:
        if attributes.norm == "none":
            return None
        names = [self._vector(name) for name in node.weights[: attributes.norm_weights]]
        bias = names[1] if attributes.norm_bias else None
        return ir.Norm(attributes.norm, names[0], bias, attributes.eps)

    def _matrix(
        self, parts: Sequence[str], biases: Sequence[str], interleaved: bool
    ) -> ir.PackedMatrix:
        values = [self.graph.weights[part] for part in parts]
        shapes = [(int(value.shape[-2]), int(value.shape[-1])) for value in values]
        experts = int(values[0].shape[0]) if len(values[0].shape) == 3 else 0
        name = parts[0]
        if len(parts) > 1:
            name = joined_name([part.removesuffix(".weight") for part in parts]) + ".weight"
        matrix = ir.PackedMatrix(
            name,
            tuple(parts),
            tuple(biases),
            interleaved,
            rows=sum(rows for rows, _ in shapes),
            columns=shapes[0][1],
            layout=self.layout_of(parts[0]),
            experts=experts,
        )
        known = self.matrices.setdefault(name, matrix)
        if (known.parts, known.interleaved) != (matrix.parts, matrix.interleaved):
            raise GraphError(name, "is the name of two different matrices")
        return known

    def _vector(self, name: str) -> str:
        self.vectors[name] = None
        return name

    def _buffer(self, node: Node, index: int) -> int:
        name = node.inputs[index]
        if name not in self.buffer_of:
            raise GraphError(node.name, f"{node.op}: '{name}' lies in no buffer")
        return self.buffer_of[name]

    def _new_buffer(self, node: Node) -> int:
        rows, width = node.value.shape
        assert isinstance(rows, str) and isinstance(width, int), node
        self.buffer_of[node.name] = len(self.names)
        self.names.append(node.name)
        self.rooms.append(ArenaPlace(width, _KINDS[rows]))
        return self.buffer_of[node.name]
