"""R09: requests in random schedules give the same tokens as alone.

Most schedules use the toy model, whose output is known without an engine. The others use the
default model on the native kernels.
"""

import logging
import random
from collections import Counter
from functools import partial

from tests.property.run_schedules import (
    KINDS,
    Model,
    adapters_model,
    native_model,
    run_schedule,
    tiny_model,
    toy_model,
)
from tests.scoreboard.figure import Run, Values, at_most, figure

NUM_TOY, NUM_NATIVE = 1700, 100
TOY = set(KINDS) - {"by_model", "mixes", "adapter_returns"}
# The tiny model has a draft model, and the last one has LoRA adapters.
NATIVE = {"native": native_model, "tiny": tiny_model, "adapters": adapters_model}


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
        for name in () if run.quick else NATIVE:
            _run_native(run, name, seen)
    finally:
        logging.disable(before)
    run.notes |= {kind: seen[kind] for kind in ("compared", *KINDS)}
    return {
        "mismatches": len(run.failures),
        "kinds_not_met": sum(seen[kind] == 0 for kind in KINDS if not run.quick or kind in TOY),
    }


def _run_native(run: Run, name: str, seen: Counter[str]) -> None:
    """Loading and reference runs take long, so all schedules of a model have the same requests."""
    model = NATIVE[name](run.random(name))
    for number in range(NUM_NATIVE):
        run.cases += 1
        try:
            _compare(model, run.random(name, number), seen)
        except Exception as error:
            run.fail(f"{name} schedule {number}: {type(error).__name__}: {error}")
