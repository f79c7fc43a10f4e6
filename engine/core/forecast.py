"""Who gets one of a limited number of places, and how long one will have to wait for it."""

from collections import deque

# Seconds of history from which the rate is measured.
MIN_HISTORY_S, MAX_HISTORY_S = 2.0, 30.0
# A tenant may hold this many times as many places as it leaves free.
MAX_GREED = 7


def may_take(tenant: str, own: int, taken: int, most: int, count: int = 1) -> bool:
    """Whether a tenant that holds `own` of the `taken` places may take `count` more. There are
    `most` places. Each tenant leaves some of those that it finds free, so however many places one
    tenant wants, another one still gets some. The tenant without a name has no others beside it,
    and may take all.
    """
    num_left = most - taken - count
    return num_left >= 0 if not tenant else own + count - 1 <= MAX_GREED * num_left


def most_places(tenant: str, most: int) -> int:
    """How many of `most` places one tenant alone may hold."""
    return (MAX_GREED * most + 1) // (MAX_GREED + 1) if tenant else most


class WaitForecast:
    """Predicts how long something waits, from the rate at which others that waited began lately."""

    def __init__(self) -> None:
        # (time, number of those that had begun) while others waited, oldest first
        self._samples: deque[tuple[float, int]] = deque()
        self._interval_s = 0.0

    def observe(self, now: float, num_waiting: int, num_begun: int) -> None:
        """Note that `num_waiting` wait, and that `num_begun` have ever begun. Call this often: the
        history begins anew when nothing waits.
        """
        samples = self._samples
        if not num_waiting:
            if samples:
                samples.clear()
                self._interval_s = 0.0
            return
        if not samples or now - samples[-1][0] >= MIN_HISTORY_S / 4:
            samples.append((now, num_begun))
        while now - samples[0][0] > MAX_HISTORY_S:
            samples.popleft()
        since, num_before = samples[0]
        lasted_s = now - since
        is_known = lasted_s >= MIN_HISTORY_S
        self._interval_s = lasted_s / max(1, num_begun - num_before) if is_known else 0.0

    def seconds(self, num_before: int) -> float:
        """The expected wait of one before which `num_before` others begin. 0 if nothing waited a
        few seconds ago.
        """
        # The next one begins half an interval from now on average.
        return (num_before + 0.5) * self._interval_s
