"""When a backend that says it is well, and fails all the same, is left out for a while.

So many failures in a row, or a high share of failures among the last requests, eject it. The time
out doubles with each ejection and is short again after a good while. When it is over, one request
at a time tries the backend; a success brings it back, a failure ejects it for longer.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

CONSECUTIVE_FAILURES = 3
WINDOW = 20  # requests of which the share of failures is taken
MIN_IN_WINDOW = 10
MAX_FAILURE_SHARE = 0.5
FIRST_EJECTION_S = 1.0
MAX_EJECTION_S = 60.0
MAX_DOUBLINGS = 10
FORGIVEN_AFTER_S = 60.0  # of being in


@dataclass
class Outlier:
    """One backend's record."""

    clock: Callable[[], float] = time.monotonic
    num_ejections: int = 0  # in all
    _in_a_row: int = 0  # ejections, until forgiven
    _consecutive: int = 0
    _window: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))  # True: failed
    _out_until: float | None = None  # None: it is in
    _returned_at: float = float("-inf")
    _is_probed: bool = False

    @property
    def is_out(self) -> bool:
        """Its time out is not over."""
        return self._out_until is not None and self.clock() < self._out_until

    @property
    def wants_probe(self) -> bool:
        """Its time out is over, and nobody tries it yet."""
        return self._out_until is not None and not self.is_out and not self._is_probed

    @property
    def is_ejected(self) -> bool:
        """Out, or not tried yet, or being tried."""
        return self._out_until is not None

    @property
    def seconds_left(self) -> float:
        return 0.0 if self._out_until is None else max(0.0, self._out_until - self.clock())

    def begin(self) -> None:
        """A request goes there."""
        if self._out_until is not None:
            self._is_probed = True

    def abandon(self) -> None:
        """A request ended without telling anything about the backend."""
        self._is_probed = False

    def pardon(self) -> None:
        """The backend was down by its own account and is back: what it did before says nothing."""
        self._out_until = None
        self._is_probed = False
        self._consecutive = 0
        self._window.clear()

    def succeed(self) -> None:
        self._consecutive = 0
        self._is_probed = False
        if self._out_until is not None:
            self._out_until = None
            self._returned_at = self.clock()
            self._window.clear()
        self._window.append(False)

    def fail(self, may_eject: bool) -> bool:
        """Whether this failure ejected it."""
        was_probed, self._is_probed = self._is_probed, False
        self._consecutive += 1
        self._window.append(True)
        if not may_eject or self.is_out:
            return False
        if was_probed or self._consecutive >= CONSECUTIVE_FAILURES or self._fails_often():
            self._eject()
            return True
        return False

    def _fails_often(self) -> bool:
        count = len(self._window)
        return count >= MIN_IN_WINDOW and sum(self._window) > MAX_FAILURE_SHARE * count

    def _eject(self) -> None:
        now = self.clock()
        if self._out_until is None and now - self._returned_at > FORGIVEN_AFTER_S:
            self._in_a_row = 0
        self.num_ejections += 1
        self._in_a_row = min(self._in_a_row + 1, MAX_DOUBLINGS)
        self._out_until = now + min(MAX_EJECTION_S, FIRST_EJECTION_S * 2 ** (self._in_a_row - 1))
        self._consecutive = 0
        self._window.clear()
