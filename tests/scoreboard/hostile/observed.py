"""`engine serve`, with the age of its engine's last tick written to a file, as lines of JSON:

    python -m tests.scoreboard.hostile.observed serve MODEL ...

A thread reads the shared memory often, so a silence is seen even if the server reports none.
"""

import json
import os
import threading
import time

from engine.backends.custom.ipc.heartbeat import Heartbeat
from engine.cli.main import main

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


def _observe(path: str) -> None:
    with open(path, "a", buffering=1) as file:
        while True:
            longest, ends = 0.0, time.monotonic() + LINE_EVERY_S
            while time.monotonic() < ends:
                for heart in list(_latest):
                    longest = max(longest, heart.vitals().silent_s or 0.0)
                time.sleep(LOOK_EVERY_S)
            file.write(json.dumps({"silent_s": round(longest, 3)}) + "\n")


if __name__ == "__main__":
    _remember()
    observer = threading.Thread(target=_observe, args=(os.environ[FILE_VARIABLE],), daemon=True)
    observer.start()
    main()
