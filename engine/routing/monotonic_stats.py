"""Statistics of engines that restart, or that come and go: their totals never become smaller."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from engine.core.interfaces.stats import EngineStats, TierStats

# Fields of `EngineStats` that never become smaller while an engine process runs.
_COUNTS = (
    *("num_steps", "prompt_tokens", "cached_tokens", "generated_tokens", "prefix_queries"),
    *("prefix_hits", "num_preemptions", "num_evictions", "num_nonfinite"),
    *("num_invariant_failures", "num_drafted_tokens", "num_accepted_tokens"),
    *("num_model_drafted_tokens", "num_model_accepted_tokens"),
)
_TOTALS = (*_COUNTS, "steps")
_GAUGES = (
    *("num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks"),
    *("num_referenced_blocks", "num_window_blocks", "num_free_window_blocks"),
    "num_referenced_window_blocks",
)


class MonotonicStats:
    """The totals of one engine, which continue when its process is replaced."""

    def __init__(self) -> None:
        self._carried = _no_totals()  # totals of engine processes that have ended
        self._last = EngineStats()

    def update(self, stats: EngineStats) -> EngineStats:
        """The statistics of the running process, with the totals of all processes."""
        if any(getattr(stats, name) < getattr(self._last, name) for name in _COUNTS):
            for name in _TOTALS:
                self._carried[name] += getattr(self._last, name)
        self._last = stats
        return msgspec.structs.replace(stats, **self.totals())

    def totals(self) -> dict[str, Any]:
        """The last known totals, over all processes. They are also available while none runs."""
        return {name: getattr(self._last, name) + self._carried[name] for name in _TOTALS}

    def absorb(self, other: "MonotonicStats") -> None:
        """Add the totals of an engine that has gone."""
        for name, value in other.totals().items():
            self._carried[name] += value


def summed(told: Sequence[EngineStats], totals: Iterable[MonotonicStats]) -> EngineStats | None:
    """The sum of the statistics of several engines. `told` are the statistics of the engines that
    run now. None if no engine has sent statistics yet.
    """
    added = _no_totals()
    for each in totals:
        for name, value in each.totals().items():
            added[name] += value
    if not told and not added["num_steps"]:
        return None
    gauges = {name: sum(getattr(each, name) for each in told) for name in _GAUGES}
    block_size = max((each.block_size for each in told), default=0)
    return EngineStats(**gauges, **added, block_size=block_size, tiers=_sum_tiers(told))


def _sum_tiers(told: Sequence[EngineStats]) -> tuple[TierStats, ...]:
    """The statistics of the tiers of all engines, added by name. A tier is up if all engines can
    read it. Engines may share a tier, whose blocks are then counted several times.
    """
    found: dict[str, TierStats] = {}
    for tier in (tier for stats in told for tier in stats.tiers):
        known = found.get(tier.name)
        if known is None:
            found[tier.name] = tier
            continue
        counts = {
            field: getattr(known, field) + getattr(tier, field)
            for field in TierStats.__struct_fields__
            if field not in ("name", "is_up")
        }
        is_up = known.is_up and tier.is_up
        found[tier.name] = TierStats(name=tier.name, is_up=is_up, **counts)
    return tuple(found.values())


def _no_totals() -> dict[str, Any]:
    nothing = EngineStats()
    return {name: getattr(nothing, name) for name in _TOTALS}
