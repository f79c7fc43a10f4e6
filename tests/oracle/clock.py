"""The clock and the event loop of a history: time passes only when the history says so. The memory
is given, too.
"""

import asyncio
import random
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from engine.runtime.interp import reports, steps

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


class _NoFiles(selectors.SelectSelector):
    """Nothing of a history comes from a socket or a pipe, so nobody has to ask for it."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class GivenLoop(asyncio.SelectorEventLoop):
    """The event loop of histories, which says when all tasks wait."""

    def __init__(self) -> None:
        super().__init__(_NoFiles())

    @property
    def is_idle(self) -> bool:
        return not self._ready  # type: ignore[attr-defined]


PIECE_BYTES, ROWS_PER_TURN = 512, 3  # of what a request reads, unless it is alone


@contextmanager
def small_pieces() -> Iterator[None]:
    """What a request reads is made in many turns, and sent in many messages."""
    pieces = mock.patch.object(reports, "PIECE_BYTES", PIECE_BYTES)
    with pieces, mock.patch.object(reports, "ROWS_PER_TURN", ROWS_PER_TURN):
        yield


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
