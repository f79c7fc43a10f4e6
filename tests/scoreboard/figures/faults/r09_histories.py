"""R09: whole requests in random histories of engines give what they give alone.

Most histories use the toy model. The others use tiny models on the native kernels and on PyTorch.
"""

from collections import Counter
from functools import partial

from tests.oracle.__main__ import drawn, explained
from tests.oracle.check import Oracle
from tests.oracle.level import LEVELS
from tests.scoreboard.figure import Run, Values, at_most, figure

NUM_TOY, NUM_TINY = 5000, 200
KINDS = (
    *("kill", "revivals", "swap", "freeze", "late", "cancel", "preemptions", "hits", "loads"),
    *("tier_lost", "tier_fails", "fault", "memory", "nan", "accepted", "rejected", "by_model"),
    *("load_adapter", "calm"),
)


class DifferenceError(AssertionError):
    """A request gave something else than alone."""


def toy_history(seed: int) -> None:
    """Draw the requests and the history of a seed, and check them."""
    oracle = Oracle(LEVELS["toy"]())
    try:
        _check(oracle, Counter(), seed)
    finally:
        oracle.close()


def _check(oracle: Oracle, seen: Counter[str], seed: int) -> None:
    report = oracle.check(drawn(oracle, seed), str(seed))
    seen += report.seen
    if report.wrong:
        raise DifferenceError(explained(oracle, seed))


@figure(
    "R09",
    "whole requests of all features in random histories: batched, chunked, from the cache or a"
    " tier, preempted, repeated, continued in another engine",
    minutes=8,
    limits={"differences": at_most(0), "kinds_not_met": at_most(0)},
    case=toy_history,
)
def histories(run: Run) -> Values:
    seen: Counter[str] = Counter()
    run.repeat(run.share(NUM_TOY, 400), partial(_check, Oracle(LEVELS["toy"]()), seen))
    for name in () if run.quick else ("native", "torch"):
        run.repeat(NUM_TINY, partial(_check, Oracle(LEVELS[name]()), seen))
    run.notes |= {kind: seen[kind] for kind in ("submit", *KINDS)}
    return {
        "differences": len(run.failures),
        "kinds_not_met": sum(seen[kind] == 0 for kind in KINDS),
    }
