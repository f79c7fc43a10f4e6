"""The clock of a history: time passes only when the history says so. The memory is given, too."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from engine.runtime.interp import steps

# Reading what the machine has takes long.
_ROOM = (steps, "memory_room", lambda: SimpleNamespace(plannable=2**40))
TICK_S = 1e-9  # so that no two readings are the same


class Clock:
    """Stands in the place of `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += TICK_S
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def given_clock(seed: str) -> Iterator[Clock]:
    """Replaces the clock, and seeds what is drawn at random beside the requests."""
    clock, state = Clock(), random.getstate()
    random.seed(seed)
    try:
        with mock.patch.object(time, "monotonic", clock), mock.patch.object(*_ROOM):
            yield clock
    finally:
        random.setstate(state)
