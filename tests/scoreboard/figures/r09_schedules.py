"""R09: requests in random schedules give the same tokens as alone.

Most schedules use the toy model, whose output is known without an engine. The others use the
default model on the native kernels.
"""

import logging
import random
from collections import Counter
from functools import partial

from tests.property.run_schedules import KINDS, Model, native_model, run_schedule, toy_model
from tests.scoreboard.figure import Run, Values, at_most, figure

NUM_TOY, NUM_NATIVE = 1900, 100


class MismatchError(AssertionError):
    """A request's tokens depended on the schedule."""


def toy_schedule(seed: int, seen: Counter[str] | None = None) -> None:
    """Generate requests and a schedule from the seed, and run them."""
    rng = random.Random(seed)
    _compare(toy_model(rng), rng, Counter() if seen is None else seen)


def _compare(model: Model, rng: random.Random, seen: Counter[str]) -> None:
    if mismatches := run_schedule(model, rng, seen):
        raise MismatchError(f"{mismatches} choices differ from what they are alone")


@figure(
    "R09",
    "output equality over random schedules: batched, chunked, from the cache or a tier, preempted,"
    " repeated, continued in another engine",
    minutes=6,
    limits={"mismatches": at_most(0), "kinds_not_met": at_most(0)},
    case=toy_schedule,
)
def schedules(run: Run) -> Values:
    seen: Counter[str] = Counter()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # injected faults are logged like real ones
    try:
        run.repeat(run.share(NUM_TOY), partial(toy_schedule, seen=seen))
        if not run.quick:
            _run_native(run, seen)
    finally:
        logging.disable(before)
    run.notes |= {kind: seen[kind] for kind in ("compared", *KINDS)}
    return {
        "mismatches": len(run.failures),
        "kinds_not_met": sum(seen[kind] == 0 for kind in KINDS),
    }


def _run_native(run: Run, seen: Counter[str]) -> None:
    """Loading and the reference runs take long, so all native schedules use the same requests."""
    model = native_model(run.random("native"))
    for number in range(NUM_NATIVE):
        run.cases += 1
        try:
            _compare(model, run.random("native", number), seen)
        except Exception as error:
            run.fail(f"native schedule {number}: {type(error).__name__}: {error}")
