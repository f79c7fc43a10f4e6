"""One of the engines of a pool."""

from engine.core.interfaces.handover import BlockSource, Role
from engine.frontend.engine_link import EngineLink
from engine.routing.monotonic_stats import MonotonicStats


class PooledEngine:
    """One engine of a pool. `fingerprint` is equal for engines in which a request has the same
    result.
    """

    def __init__(self, name: str, link: EngineLink, fingerprint: str, number: int = -1) -> None:
        self.name = name
        self.link = link
        self.fingerprint = fingerprint
        self.number = number
        self.num_requests = 0
        self.num_restarts = link.num_restarts
        self.is_leaving = False
        self.is_silent = False
        self.totals = MonotonicStats()
        self.role: Role = "both"
        self.blocks: BlockSource | None = None  # where a prefill node serves blocks

    @property
    def identity(self) -> str:
        """Equal for engines that can use each other's blocks. Empty if it exchanges none."""
        ready = self.link.ready
        return "" if ready is None else ready.cache_identity

    @property
    def load(self) -> int:
        return self.link.num_open

    @property
    def fullness(self) -> float:
        stats = self.link.stats
        if stats is None or not stats.num_blocks:
            return 0.0
        return stats.num_referenced_blocks / stats.num_blocks

    @property
    def state(self) -> str:
        if self.is_leaving:
            return "leaving"
        if not self.link.is_up:
            return "down"
        return "ejected" if self.is_silent else "ready"
