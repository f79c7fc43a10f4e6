"""The facts of `engine inspect --graph` as plain data: nodes, steps, places of buffers, times."""

from dataclasses import asdict, dataclass
from typing import Any

from engine.backends.custom.ir.plan import Capacity, Split
from engine.backends.custom.ir.types import Counts, Dim


@dataclass(frozen=True, slots=True)
class StepSize:
    """What is priced and timed: a generated token of each sequence, or the last of a prompt."""

    tokens: int
    context: int  # length of each sequence, these tokens included
    is_prompt: bool

    @property
    def counts(self) -> Counts:
        if self.is_prompt:
            return Counts(self.tokens, 1, context=self.context - (self.tokens - 1) // 2)
        return Counts(self.tokens, self.tokens, self.context, sequences=self.tokens)


@dataclass(frozen=True, slots=True)
class WeightFacts:
    name: str
    shape: tuple[int, ...]
    type: str  # as the file stores it
    bytes: int  # in the file


@dataclass(frozen=True, slots=True)
class NodeFacts:
    name: str
    op: str
    layer: int | None
    inputs: tuple[str, ...]
    weights: tuple[WeightFacts, ...]
    attributes: dict[str, Any]
    shape: tuple[Dim, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StepFacts:
    """`generated` and `prompt` are the arithmetic for such tokens; None: no kernels are built."""

    kind: str
    label: str  # the same for the same step of every layer
    layer: int | None
    nodes: tuple[str, ...]
    layout: str | None  # of a matrix, as the kernels read it
    generated: str | None
    prompt: str | None
    weights: tuple[WeightFacts, ...]
    stored_bytes: int
    flops: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    bytes: int
    places: tuple[int, ...]  # of the buffers that are read and written
    split: Split | None  # of a product: its units, and how many a thread claims at once
    seconds: float | None


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """A part of the arena: so many floats for each row, where rows are tokens or wanted logits."""

    floats: int
    per: str
    bytes: int


@dataclass(frozen=True, slots=True)
class KindFacts:
    """The same step of every layer, all together."""

    label: str
    steps: int
    flops: int
    bytes: int
    seconds: float
    share: float  # of the time of all steps
    gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Report:
    path: str
    family: str
    layers: int
    step: StepSize
    sequences: int
    logits: int
    threads: int
    instruction_set: str | None  # None: the kernels are not built
    kv_type: str
    inputs: dict[str, str]
    nodes: tuple[NodeFacts, ...]
    outputs: tuple[str, ...]
    capacity: Capacity  # the most that the plan serves
    steps: tuple[StepFacts, ...]
    places: tuple[PlaceFacts, ...]
    arena_bytes: int  # for this step; `capacity_bytes` for the largest that the plan serves
    capacity_bytes: int
    totals: dict[str, int]
    kinds: tuple[KindFacts, ...]  # only when timed
    forward_seconds: float | None
    forwards: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
