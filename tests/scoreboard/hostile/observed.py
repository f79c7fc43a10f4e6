"""`engine serve`, with the silences of its engine written to a file, as lines of JSON:

    python -m tests.scoreboard.hostile.observed serve MODEL ...

A thread reads the heartbeat often, so a silence is seen even if the server reports none. The time
that the engine waited for a CPU is subtracted: that is the machine's fault.
"""

import contextlib
import json
import os
import threading
import time

import psutil

from engine.cli.main import main
from engine.core.sandbox.liveness import Heartbeat
from engine.ipc.engine_process import WORKER_MODULE
from tests.scoreboard.meters import queued_ns

FILE_VARIABLE = "SCOREBOARD_SILENCES"
LOOK_EVERY_S = 0.05
LINE_EVERY_S = 0.5

_latest: list[Heartbeat] = []  # the heartbeat of the engine that runs; empty before there is one


def _remember() -> None:
    init = Heartbeat.__init__

    def remembering(heart: Heartbeat, fileno: int) -> None:
        init(heart, fileno)
        _latest[:] = [heart]

    Heartbeat.__init__ = remembering  # type: ignore[method-assign]


class Silence:
    """Measures for how long the engine has been silent by its own fault."""

    def __init__(self) -> None:
        self._age_s = 0.0
        self._queued: dict[str, int] = {}  # when it ticked last

    def measure(self) -> tuple[float, float]:
        """Seconds since the last tick, without and with the time that it waited for a CPU."""
        if not _latest:
            return 0.0, 0.0
        age_s, queued = _latest[0].vitals().silent_s or 0.0, _queued_of_engine()
        if age_s < self._age_s:
            self._queued = queued
        self._age_s = age_s
        waits = (ns - self._queued.get(thread, ns) for thread, ns in queued.items())
        return age_s - max(waits, default=0) / 1e9, age_s


def _queued_of_engine() -> dict[str, int]:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):  # it has just ended
            if WORKER_MODULE in child.cmdline():
                return queued_ns(child.pid)
    return {}


def _observe(path: str) -> None:
    silence = Silence()
    with open(path, "a", buffering=1) as file:
        while True:
            silent_s = late_s = 0.0
            ends = time.monotonic() + LINE_EVERY_S
            while time.monotonic() < ends:
                own_s, whole_s = silence.measure()
                silent_s, late_s = max(silent_s, own_s), max(late_s, whole_s)
                time.sleep(LOOK_EVERY_S)
            told = {"silent_s": round(silent_s, 3), "late_s": round(late_s, 3)}
            file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    _remember()
    observer = threading.Thread(target=_observe, args=(os.environ[FILE_VARIABLE],), daemon=True)
    observer.start()
    main()
