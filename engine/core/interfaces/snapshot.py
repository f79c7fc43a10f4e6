"""What an engine is doing at one moment, for the live view. Every list in it is bounded."""

import msgspec

MAX_RUNNING = 128
MAX_WAITING = 64
MAX_NODES = 160
MAX_TENANTS = 32
MAX_SNAPSHOT_STEPS = 16


class RunningRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence in the batch."""

    request_id: str
    choice: int
    tenant: str
    slot: int
    num_prompt: int
    num_computed: int  # tokens whose keys and values are computed
    num_generated: int
    max_tokens: int
    num_cached: int
    num_blocks: int
    num_preemptions: int
    seconds: float  # since it was submitted


class WaitingRow(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    tenant: str
    num_prompt: int
    priority: int
    seconds: float  # since it was submitted
    is_held: bool  # whether it waits for a sequence that computes the same prefix


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    ended_at: float  # time.monotonic()
    seconds: float
    num_rows: int
    num_tokens: int
    num_prompt_tokens: int


class TreeNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the radix tree, by the index of its parent in the list. -1: it is at the top."""

    parent: int
    num_blocks: int
    num_uses: int
    num_holders: int  # sequences that hold its first block


class TreeSize(msgspec.Struct, frozen=True, array_like=True):
    num_nodes: int = 0
    num_blocks: int = 0
    num_shared: int = 0  # nodes that more than one sequence holds
    nodes: tuple[TreeNode, ...] = ()  # the first MAX_NODES, parents first


class TenantShare(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    num_running: int
    num_waiting: int
    num_blocks: int


class KernelShare(msgspec.Struct, frozen=True, array_like=True):
    """The seconds that one kind of kernel took in the last step."""

    name: str
    seconds: float


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    at: float  # time.monotonic()
    blocked_by: str  # what the first waiting sequence waits for; see `timeline.WAITS`
    max_slots: int
    running: tuple[RunningRow, ...]
    waiting: tuple[WaitingRow, ...]
    steps: tuple[StepTime, ...]  # the latest, oldest first
    tree: TreeSize
    tenants: tuple[TenantShare, ...]
    kernels: tuple[KernelShare, ...]  # empty if the framework does not report them
