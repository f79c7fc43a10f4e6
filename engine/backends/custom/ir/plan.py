"""The execution plan: plan steps over numbered buffers, with every decision already made.

A buffer holds one row of `width` floats per token, or per token whose logits are wanted. Buffers
with disjoint lifetimes share a place of the arena; all buffers of a place have the same row kind.
A plan step's `nodes` are the graph nodes that it computes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.backends.custom.ir.types import Numerics

Activation = Literal["none", "silu", "gelu", "gelu_tanh"]
RowKind = Literal["token", "logit"]

PANEL_ROWS = 16  # matrix rows that a kernel computes together


@dataclass(frozen=True, slots=True)
class Capacity:
    """The max number of rows that a plan serves; a step may have fewer."""

    tokens: int
    logits: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The capabilities of the CPU that a plan is made for."""

    threads: int
    instruction_set: str = "generic"  # the best one that has kernels
    has_bf16: bool = False  # the CPU has bfloat16 matmul kernels


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision that the user chose."""

    exact: bool = False  # float activations everywhere
    kv_type: str = "bfloat16"  # storage type of the KV cache; or float32, int8


@dataclass(frozen=True, slots=True)
class Kernel:
    """The numerics of decode tokens and of prefill tokens."""

    decode: Numerics
    prefill: Numerics


@dataclass(frozen=True, slots=True)
class Split:
    """A matmul's work units, and how many of them a thread claims at once.

    A unit is a panel, or a pair of them when gated.
    """

    units: int
    grain: int


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm that a matmul applies to its input."""

    kind: Literal["rms", "layer"]
    weight: str
    bias: str | None
    eps: float


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights that a kernel reads as one matrix: the rows of all parts, stacked in order.

    `interleaved`: panels of 16 rows alternate between the two parts instead (gate, up, gate, ...),
    each part's last panel padded. `biases` has one name for each part, or none at all.
    """

    name: str
    parts: tuple[str, ...]
    biases: tuple[str, ...]
    interleaved: bool
    rows: int  # of all parts, without padding
    columns: int
    layout: str  # of the panels; all parts have the same


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    width: int  # floats per row
    per: RowKind
    place: int


@dataclass(frozen=True, slots=True)
class EmbedStep:
    """out = scale * table[token], plus positions[position] where there is such a table."""

    nodes: tuple[str, ...]
    out: int
    table: str  # a matrix
    positions: str | None  # a vector: (max positions, width) floats
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LinearStep:
    """out[:, column:] = activation(norm(source) @ matrix.T + bias), or one of its variants.

    gated     the matrix interleaves gate and up: activation(gate) * up
    residual  the result is added to the contents of `out`
    scale     multiplies the result before the residual is added
    multiply  the contents of `out` are multiplied by the result
    """

    nodes: tuple[str, ...]
    source: int
    out: int
    norm: Norm | None
    matrix: str
    activation: Activation
    gated: bool
    residual: bool
    has_bias: bool
    kernel: Kernel
    split: Split
    column: int = 0
    multiply: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeWriteStep:
    """Norms and rotates the heads of q and k in place, then writes k and v to the cache.

    Columns of `qkv`: `heads` heads of q, `kv_heads` of k, `kv_heads` of v.
    """

    nodes: tuple[str, ...]
    qkv: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int  # values of a head that are rotated; 0: none
    q_norm: str | None
    k_norm: str | None
    eps: float  # of those norms
    whole_norm: bool = False  # one norm over all heads of a token; else one norm per head


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """out = attention of the queries of `qkv` over the cache."""

    nodes: tuple[str, ...]
    qkv: int
    out: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a token sees this many positions, itself included
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class AddNormStep:
    """out += rms_norm(source)"""

    nodes: tuple[str, ...]
    source: int
    out: int
    weight: str
    eps: float


@dataclass(frozen=True, slots=True)
class GatherStep:
    """Copies the rows of the tokens whose logits are wanted."""

    nodes: tuple[str, ...]
    source: int
    out: int


Step: TypeAlias = EmbedStep | LinearStep | RopeWriteStep | AttentionStep | AddNormStep | GatherStep


def weights_of(step: Step, matrices: Mapping[str, PackedMatrix]) -> tuple[str, ...]:
    """Names of the weights that a plan step reads; `matrices` are the plan's, by name."""
    names: list[str | None] = []
    match step:
        case EmbedStep():
            names = [*matrices[step.table].parts, step.positions]
        case LinearStep():
            matrix = matrices[step.matrix]
            norm = [step.norm.weight, step.norm.bias] if step.norm else []
            names = [*norm, *matrix.parts, *matrix.biases]
        case RopeWriteStep():
            names = [step.q_norm, step.k_norm]
        case AddNormStep():
            names = [step.weight]
    return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    places: tuple[int, ...]  # width of each arena place, in floats per row
    matrices: tuple[PackedMatrix, ...]
    vectors: tuple[str, ...]  # weights kept as floats: norms, the position table
    output: int  # the buffer of the logits
    capacity: Capacity
    machine: Machine
    precision: Precision
    weights: tuple[str, ...]  # every weight, in order of first use

    def floats_per(self, kind: RowKind) -> int:
        """Width of the arena in floats, for rows of this kind."""
        kinds = {buffer.place: buffer.per for buffer in self.buffers}
        return sum(self.places[place] for place, per in kinds.items() if per == kind)

    @property
    def arena_floats(self) -> int:
        """The arena's size in floats at full capacity."""
        tokens = self.capacity.tokens * self.floats_per("token")
        return tokens + self.capacity.logits * self.floats_per("logit")


_LAYER = re.compile(r"layers\.(\d+)\.")
_KINDS: Mapping[type, str] = {
    EmbedStep: "embed",
    LinearStep: "linear",
    RopeWriteStep: "rope + write",
    AttentionStep: "attention",
    AddNormStep: "norm + add",
    GatherStep: "gather",
}


def step_kind(step: Step) -> str:
    return _KINDS[type(step)]


def step_label(step: Step) -> str:
    """A label such as "linear attn.q_k_v", equal in every layer, for tables of times."""
    kind = step_kind(step)
    if not isinstance(step, LinearStep):
        return kind
    inside = _LAYER.match(step.matrix)
    name = step.matrix[inside.end() :].removesuffix(".weight") if inside else step.nodes[-1]
    return f"{kind} {name}"


def layer_of(name: str) -> int | None:
    """The layer that a node or weight name belongs to; None: no layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None
