"""Takes snapshots of the engine for the live view, only while somebody watches it."""

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from engine.core.interfaces.snapshot import (
    MAX_NODES,
    MAX_RUNNING,
    MAX_SNAPSHOT_STEPS,
    MAX_TENANTS,
    MAX_WAITING,
    EngineSnapshot,
    KernelShare,
    RunningRow,
    StepTime,
    TenantShare,
    TreeNode,
    TreeSize,
    WaitingRow,
)
from engine.runtime.insight.profiler import KernelTimer

if TYPE_CHECKING:
    from engine.runtime.insight.request_timing import RequestTimings
    from engine.runtime.model_runner import ModelRunner
    from engine.runtime.radix_cache import Node
    from engine.runtime.scheduler import Scheduler
    from engine.runtime.sequence import Sequence
    from engine.runtime.sequence_table import SequenceTable

# If nobody has asked for this many seconds, kernels are no longer timed.
WATCHED_S = 3.0
# The tree is walked again after this many seconds at the earliest.
TREE_S = 1.0
MAX_WALKED = 4096  # after this many nodes, no deeper level of the tree is counted


class SnapshotTaker:
    def __init__(
        self, scheduler: "Scheduler", timings: "RequestTimings", runner: "ModelRunner"
    ) -> None:
        self._scheduler = scheduler
        self._timings = timings
        self._timer = runner if isinstance(runner, KernelTimer) else None
        self._asked_at: float | None = None  # None: nobody watches
        self._tree, self._tree_at = TreeSize(), 0.0

    def take(self, now: float) -> EngineSnapshot:
        table, timings = self._scheduler.table, self._timings
        if self._asked_at is None:
            self._time_kernels(True)
        self._asked_at = now
        if now - self._tree_at >= TREE_S:
            self._tree, self._tree_at = _tree(self._scheduler), now
        steps = list(timings.clock.steps)[-MAX_SNAPSHOT_STEPS:]
        kernels = {} if self._timer is None else self._timer.kernel_seconds()
        return EngineSnapshot(
            at=now,
            blocked_by=timings.clock.blocked_by,
            max_slots=table.max_slots,
            running=tuple(
                _running(seq, now - timings.submitted_at(seq))
                for seq in islice(table.running, MAX_RUNNING)
            ),
            waiting=tuple(
                _waiting(seq, now - timings.submitted_at(seq))
                for seq in islice(table.waiting, MAX_WAITING)
            ),
            steps=tuple(
                StepTime(
                    each.ended_at,
                    each.ended_at - each.began_at,
                    each.num_rows,
                    each.num_tokens,
                    each.num_prompt_tokens,
                )
                for each in steps
            ),
            tree=self._tree,
            tenants=_tenants(table),
            kernels=tuple(KernelShare(name, seconds) for name, seconds in kernels.items()),
        )

    def expire(self, now: float) -> None:
        """Stop timing kernels if nobody watches any more."""
        if self._asked_at is not None and now - self._asked_at > WATCHED_S:
            self._asked_at = None
            self._time_kernels(False)

    def _time_kernels(self, on: bool) -> None:
        if self._timer is not None:
            self._timer.time_kernels(on)


def _running(seq: "Sequence", age_s: float) -> RunningRow:
    return RunningRow(
        seq.request_id,
        seq.choice,
        seq.tenant,
        seq.slot,
        seq.num_prompt,
        seq.num_computed,
        seq.num_generated,
        seq.max_tokens,
        seq.num_cached,
        len(seq.blocks),
        seq.queue.num_preemptions,
        age_s,
    )


def _waiting(seq: "Sequence", age_s: float) -> WaitingRow:
    return WaitingRow(
        seq.request_id,
        seq.tenant,
        seq.num_prompt,
        seq.priority,
        age_s,
        seq.queue.held_by is not None,
    )


def _tenants(table: "SequenceTable") -> tuple[TenantShare, ...]:
    """The tenants with most running sequences."""
    running, blocks = Counter[str](), Counter[str]()
    for seq in table.running:
        running[seq.tenant] += 1
        blocks[seq.tenant] += len(seq.blocks)
    waiting = table.waiting.counts()
    names = sorted({*running, *waiting}, key=lambda name: (-running[name], name))[:MAX_TENANTS]
    return tuple(
        TenantShare(name, running[name], waiting.get(name, 0), blocks[name]) for name in names
    )


def _tree(scheduler: "Scheduler") -> TreeSize:
    """The size of the radix tree, and its upper nodes."""
    radix, pool = scheduler.kv.radix, scheduler.kv.pool
    shown: list[TreeNode] = []
    level: list[tuple[Node, int]] = [(node, -1) for node in radix.tops()]
    num_nodes = num_blocks = num_shared = 0
    while level and num_nodes < MAX_WALKED:
        below: list[tuple[Node, int]] = []
        # Larger branches first, so that the shown part of the tree holds most blocks.
        for top, parent in sorted(level, key=lambda each: -len(each[0].blocks)):
            node, length = top, len(top.blocks)
            while len(node.children) == 1:  # each chunk of prefill added a node: show them as one
                (node,) = node.children.values()
                length += len(node.blocks)
            holders = pool.refs(top.blocks[0]) - 1 if top.blocks else 0
            num_nodes += 1
            num_blocks += length
            num_shared += holders > 1
            index = -2  # its children are not shown either
            if parent > -2 and len(shown) < MAX_NODES:
                index = len(shown)
                shown.append(TreeNode(parent, length, top.num_uses, holders))
            below += [(child, index) for child in node.children.values()]
        level = below
    return TreeSize(num_nodes, num_blocks, num_shared, tuple(shown))
