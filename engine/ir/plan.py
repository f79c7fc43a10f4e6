"""The execution plan: a list of plan steps that read and write numbered buffers. The plan also
states the kernel of each step, the memory of each buffer, and how work is split among threads.

A buffer holds `width` floats for each token, or for each token whose logits are needed. All buffers
lie in one memory arena, which is divided into places. Buffers of the same kind may share a place if
they are needed at different times. A plan step's `nodes` are the graph nodes that it computes.
"""

from typing import Literal, TypeAlias

import msgspec

from engine.ir.recurrent import Recurrence
from engine.ir.types import Numerics

Activation = Literal["none", "silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"]
RowKind = Literal["token", "logit"]

PANEL_ROWS = 16  # a kernel processes this many matrix rows together


class Capacity(msgspec.Struct, frozen=True):
    """The largest engine step that can run with a plan: the max number of tokens, and of tokens
    whose logits are needed.
    """

    tokens: int
    logits: int


class Machine(msgspec.Struct, frozen=True):
    """The capabilities of the CPU that a plan is made for."""

    threads: int
    instruction_set: str = "generic"  # the CPU's best instruction set for which kernels exist
    has_bf16: bool = False  # whether there are bfloat16 matmul kernels for this CPU


class Precision(msgspec.Struct, frozen=True):
    """The precision that the user chose."""

    exact: bool = False  # all matmuls compute in float32; activations are never quantized
    kv_type: str = "bfloat16"  # storage type of the KV cache: bfloat16, float32 or int8


class Kernel(msgspec.Struct, frozen=True):
    """The arithmetic that a kernel uses for decode tokens, and for prefill tokens."""

    decode: Numerics
    prefill: Numerics


class Split(msgspec.Struct, frozen=True):
    """How a matmul is divided among threads: the number of work units, and how many of them a
    thread claims at once (`grain`).

    A unit is a panel of `PANEL_ROWS` matrix rows. In a gated matmul, a unit is a panel of the gate
    matrix and a panel of the up matrix.
    """

    units: int
    grain: int


class Routing(msgspec.Struct, frozen=True):
    """How a router chooses the experts of a token. `ExpertsConfig` describes the fields."""

    per_token: int
    scoring: Literal["softmax", "softmax_chosen", "sigmoid"]
    renormalizes: bool
    scale: float
    groups: int
    groups_per_token: int
    group_score: Literal["best", "best_two"]


class Norm(msgspec.Struct, frozen=True):
    """A norm that a plan step applies to its input."""

    kind: Literal["rms", "layer"]
    weight: str
    bias: str | None
    eps: float


class PackedMatrix(msgspec.Struct, frozen=True):
    """Weights that a kernel reads as one matrix. It has the rows of all `parts`, one part after the
    other.

    If `interleaved`, there are two parts, gate and up. The matrix alternates between 16 rows of
    gate and 16 rows of up. The last 16 rows of each part are padded. `biases` has one name for each
    part, or is empty.
    """

    name: str
    parts: tuple[str, ...]
    biases: tuple[str, ...]
    interleaved: bool
    rows: int  # rows of all parts together, without padding
    columns: int
    layout: str  # packed layout, the same for all parts
    experts: int = 0  # above 0: there is one such matrix per expert or head, one after the other


class Buffer(msgspec.Struct, frozen=True):
    name: str
    width: int  # floats per row
    per: RowKind
    place: int


class EmbedStep(msgspec.Struct, frozen=True):
    """out = scale * table[token]. If there are learned positions, positions[position] is added. If
    there are token types, types[type] is added.
    """

    nodes: tuple[str, ...]
    out: int
    table: str  # name in `ExecutionPlan.matrices`
    positions: str | None  # name in `ExecutionPlan.vectors`: (max positions, width) floats
    scale: float = 1.0
    types: str | None = None  # name in `ExecutionPlan.vectors`: (token types, width) floats
    num_types: int = 0


class LinearStep(msgspec.Struct, frozen=True):
    """A matmul: out[:, column:] = activation(norm(source) @ matrix.T + bias). Fields change this:

    gated     the matrix interleaves gate and up, and the result is activation(gate) * up
    scale     the result is multiplied by this number
    softcap   bounds the result: softcap * tanh(result / softcap)
    residual  the result is added to the contents of `out`, instead of replacing them
    multiply  the contents of `out` are multiplied by the result, instead of being replaced
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
    softcap: float | None = None


class RopeWriteStep(msgspec.Struct, frozen=True):
    """Normalizes and rotates the heads of q and k in place, then writes k and v to the KV cache.

    The columns of `qkv` are `heads` heads of q, then `kv_heads` heads of k, then `kv_heads` of v.
    """

    nodes: tuple[str, ...]
    qkv: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int  # RoPE rotates this many values of each head; 0 if the layer has no RoPE
    q_norm: str | None
    k_norm: str | None
    eps: float  # epsilon of q_norm and k_norm
    whole_norm: bool = False  # True: one norm over all heads of a token. False: a norm per head.
    table: int = 0  # index of the RoPE table in `ModelConfig.ropes`


class HeadLinearStep(msgspec.Struct, frozen=True):
    """Multiplies each head of `source` by a matrix of its own. The last `rope_dim` values of each
    head are rotated instead and follow the results of the head.
    """

    nodes: tuple[str, ...]
    source: int
    out: int
    matrix: str  # name in `ExecutionPlan.matrices`: there is one matrix per head
    heads: int
    kernel: Kernel
    rope_dim: int = 0
    table: int = 0  # index of the RoPE table in `ModelConfig.ropes`


class LatentWriteStep(msgspec.Struct, frozen=True):
    """Normalizes the latents in the first columns of `source`, rotates the keys in its last
    `rope_dim` columns, and writes both to the KV cache. `source` is modified.
    """

    nodes: tuple[str, ...]
    source: int
    layer: int
    rope_dim: int
    norm: str  # name in `ExecutionPlan.vectors`
    eps: float
    table: int = 0  # index of the RoPE table in `ModelConfig.ropes`


class AttentionStep(msgspec.Struct, frozen=True):
    """out = attention of the queries in `qkv` over the keys and values in the KV cache."""

    nodes: tuple[str, ...]
    qkv: int
    out: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # sliding window: a token attends to this many positions, itself included
    kernel: Kernel
    softcap: float | None = None  # bounds scores: softcap * tanh(score / softcap)
    alibi_bias: float | None = None  # the largest slope exponent of ALiBi
    sinks: str | None = None  # name in `ExecutionPlan.vectors`: one logit per head
    centered: bool = False  # the window reaches as far after the token as before it
    latent: int = 0  # above 0: the first values of a key are its value; the cache has no others


class NormStep(msgspec.Struct, frozen=True):
    """out = norm(source), or out += norm(source) if `residual`."""

    nodes: tuple[str, ...]
    source: int
    out: int
    norm: Norm
    residual: bool


class RouteStep(msgspec.Struct, frozen=True):
    """out = each token's weight for each expert, 0 for those not chosen; `source` has logits."""

    nodes: tuple[str, ...]
    source: int
    out: int
    num_experts: int
    routing: Routing
    correction: str | None  # name in `ExecutionPlan.vectors`: added to the scores that choose


class ExpertsStep(msgspec.Struct, frozen=True):
    """out = sum of the chosen experts' results, each multiplied by its weight and by `scale`.

    An expert computes down(activation(gate) * up). `weights` is the buffer of a `RouteStep`.
    """

    nodes: tuple[str, ...]
    source: int
    weights: int
    out: int
    num_experts: int
    per_token: int
    up: str  # name in `ExecutionPlan.matrices`: interleaves gate and up
    down: str
    activation: Activation
    has_bias: bool
    residual: bool  # the result is added to the contents of `out`
    scale: float
    up_kernel: Kernel
    down_kernel: Kernel


class RecurrentStep(msgspec.Struct, frozen=True):
    """Runs a layer that keeps a state. `source` has the input projection's result, which the step
    may overwrite. `weights` are names in `ExecutionPlan.vectors`, in the order of
    `Recurrence.weight_shapes`.
    """

    nodes: tuple[str, ...]
    source: int
    out: int
    recurrence: Recurrence
    weights: tuple[str, ...]


class GateRowsStep(msgspec.Struct, frozen=True):
    """out *= sigmoid(source). `source` has one value per row, or as many as `out`."""

    nodes: tuple[str, ...]
    source: int
    out: int


class GatherStep(msgspec.Struct, frozen=True):
    """Copies the rows of the tokens whose logits are needed from `source` to `out`."""

    nodes: tuple[str, ...]
    source: int
    out: int


class MeanStep(msgspec.Struct, frozen=True):
    """Row i of `out` is the mean of the rows of `source` after logit token i - 1, up to logit
    token i. An encoder's logit tokens are the last tokens of its texts.
    """

    nodes: tuple[str, ...]
    source: int
    out: int


Step: TypeAlias = (
    EmbedStep
    | LinearStep
    | RopeWriteStep
    | LatentWriteStep
    | HeadLinearStep
    | AttentionStep
    | NormStep
    | RouteStep
    | ExpertsStep
    | RecurrentStep
    | GateRowsStep
    | GatherStep
    | MeanStep
)


class ExecutionPlan(msgspec.Struct, frozen=True):
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    places: tuple[int, ...]  # width of each place in the arena, in floats per token
    matrices: tuple[PackedMatrix, ...]
    vectors: tuple[str, ...]  # names of weights kept as floats: norms and the position table
    output: int  # index of the buffer with the logits
    capacity: Capacity
    machine: Machine
    precision: Precision
    weights: tuple[str, ...]  # names of all weights, in order of first use

    def floats_per(self, kind: RowKind) -> int:
        """The number of arena floats for each token (kind "token"), or for each token whose logits
        are needed (kind "logit").
        """
        kinds = {buffer.place: buffer.per for buffer in self.buffers}
        return sum(self.places[place] for place, per in kinds.items() if per == kind)

    @property
    def arena_floats(self) -> int:
        """The arena's size in floats for the largest step that the plan allows."""
        tokens = self.capacity.tokens * self.floats_per("token")
        return tokens + self.capacity.logits * self.floats_per("logit")
