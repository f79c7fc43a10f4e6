"""Reads damaged model files in a few long-lived processes. A process that dies or does not answer
fails its case and is replaced.
"""

import json
import re
import select
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.scoreboard.figure import Run, Values, at_most
from tests.scoreboard.mutations.child import SLOW_S

NUM_CHILDREN = 2
ANSWER_TIMEOUT_S = 20.0
LIMITS = {
    "crashes": at_most(0),
    "hangs": at_most(0),
    "over_memory": at_most(0),
    "untyped_errors": at_most(0),
}


class Child:
    """A process that reads cases of one kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.argv = [sys.executable, "-m", "tests.scoreboard.mutations.child", kind, str(folder)]
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._line(60.0) == "ready", "the sound files could not be read"

    def _line(self, timeout_s: float) -> str | None:
        """The next line; None on timeout, empty at the end of output."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return None
        return self.process.stdout.readline().decode().strip()

    def attempt(self, seed: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % seed)
        self.process.stdin.flush()
        answer = self._line(ANSWER_TIMEOUT_S)
        if answer:
            outcome = dict(json.loads(answer))
            assert "not_made" not in outcome, f"the case could not be made: {outcome}"
            return outcome
        ending = "never ended" if answer is None else "crashed"
        self.stop()
        status = self.process.returncode
        self._start()
        return {"seed": seed, "ending": ending, "told": f"status {status}", "seconds": 0.0}

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def is_slow(outcome: dict[str, Any]) -> bool:
    return outcome["ending"] == "never ended" or outcome["seconds"] > SLOW_S


@dataclass(slots=True)
class Tally:
    """Counts the results of the cases."""

    endings: Counter[str] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)
    slowest_s: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: dict[str, Any]) -> str | None:
        """Count a result. Returns the limit that it broke, if any."""
        ending = outcome["ending"]
        self.endings[ending] += 1
        self.slowest_s = max(self.slowest_s, outcome["seconds"])
        if ending == "refused":
            self.reasons.add(re.sub(r"'[^']*'|\"[^\"]*\"|[-\d.]+", "_", outcome["told"])[:80])
        broken = {
            "crashed": "crashes",
            "never ended": "hangs",
            "filled memory": "over_memory",
            "escaped": "untyped_errors",
        }.get(ending)
        if broken is None and is_slow(outcome):
            broken = "hangs"
        if broken is None and outcome["bytes_over"]:
            broken = "over_memory"
        if broken is not None:
            self.failed[broken] += 1
        return broken


def measure(run: Run, kind: str, count: int) -> Values:
    """Run `count` cases."""
    seeds = iter([run.random("cases", n).getrandbits(48) for n in range(count)])
    tally, lock = Tally(), threading.Lock()

    def work(folder: Path) -> None:
        child = Child(kind, folder)
        try:
            while (seed := _next(seeds, lock)) is not None:
                outcome = child.attempt(seed)
                if is_slow(outcome):  # retry: if only the machine was slow, the file is not
                    outcome = child.attempt(seed)
                with lock:
                    run.cases += 1
                    if broken := tally.add(outcome):
                        run.fail(f"{broken}: {outcome['told']}", seed)
        finally:
            child.stop()

    with tempfile.TemporaryDirectory() as folder:
        _in_threads(work, [Path(folder, str(n)) for n in range(1 if run.quick else NUM_CHILDREN)])
    run.notes |= {
        **tally.endings,
        "different_reasons": len(tally.reasons),
        "slowest_ms": round(1000 * tally.slowest_s),
    }
    assert run.quick or (tally.endings["accepted"] and len(tally.reasons) > 50), (
        "damage of one kind"
    )
    return {name: tally.failed[name] for name in LIMITS}


def _next(seeds: Iterator[int], lock: threading.Lock) -> int | None:
    with lock:
        return next(seeds, None)


def _in_threads(work: Any, folders: list[Path]) -> None:
    """Run the work in threads. Raises an error of any of them."""
    wrong: list[BaseException] = []

    def run(folder: Path) -> None:
        folder.mkdir()
        try:
            work(folder)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]


def again(kind: str, seed: int) -> None:
    """Repeat one case; raises if it breaks a limit."""
    with tempfile.TemporaryDirectory() as folder:
        child = Child(kind, Path(folder))
        try:
            outcome = child.attempt(seed)
            assert Tally().add(outcome) is None, outcome
        finally:
            child.stop()
