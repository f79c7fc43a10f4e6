"""Checks random histories over HTTP, and prints one line of JSON.

Each failing history is printed, and made small if possible. Histories are kept in `failing.jsonl`.
`histories` and `dialects` run in this process on the toy model, `served` on the default model.

    python -m tests.oracle.http --cases 2000 --seed 1
    python -m tests.oracle.http --kind dialects --cases 300
    python -m tests.oracle.http --kind served --cases 500
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.oracle.check import Report
from tests.oracle.histories import History
from tests.oracle.http.check import HttpOracle, drawn_history
from tests.oracle.http.dialects import dialect_problems, draw_for_dialects
from tests.oracle.http.served import ServedOracle, served_oracle
from tests.oracle.http.served import drawn_history as served_history
from tests.oracle.http.toy_server import toy_server
from tests.oracle.shrink import shrunk

ENOUGH_FAILURES = 5


class Histories:
    """Histories of the toy model, in this process."""

    def __init__(self, oracle: HttpOracle) -> None:
        self._oracle = oracle

    def drawn(self, seed: int) -> History:
        return drawn_history(seed)

    def check(self, seed: int) -> Report:
        return self._oracle.check(self.drawn(seed))

    def explained(self, seed: int) -> str:
        small = shrunk(self.drawn(seed), lambda each: bool(self._oracle.check(each).wrong))
        return "\n  ".join([str(small), *self._oracle.check(small).wrong])


class Dialects:
    """Single requests on the toy model, each in all APIs."""

    def __init__(self, oracle: HttpOracle) -> None:
        self._oracle = oracle

    def check(self, seed: int) -> Report:
        drawn = draw_for_dialects(seed)
        wrong = self._oracle.run(dialect_problems(self._oracle, drawn))
        return Report(wrong, Counter(dict.fromkeys(drawn.features, 1)))

    def explained(self, seed: int) -> str:
        drawn = draw_for_dialects(seed)
        told = f"{list(drawn.prompt)} {drawn.features}"
        return "\n  ".join([told, *self.check(seed).wrong])


class ServedHistories:
    """Histories of a real server. Shrinking one would take hours."""

    def __init__(self, oracle: ServedOracle) -> None:
        self._oracle = oracle
        self._wrong: list[str] = []

    def check(self, seed: int) -> Report:
        report = self._oracle.check(served_history(seed))
        self._wrong = report.wrong
        return report

    def explained(self, seed: int) -> str:
        return "\n  ".join([str(served_history(seed)), *self._wrong])


Checks = Histories | Dialects | ServedHistories


@contextmanager
def opened(kind: str) -> Iterator[Checks]:
    if kind == "served":
        with served_oracle() as served:
            yield ServedHistories(served)
        return
    with tempfile.TemporaryDirectory() as name, toy_server(Path(name)) as server:
        oracle = HttpOracle(server)
        yield Histories(oracle) if kind == "histories" else Dialects(oracle)


KINDS = ("histories", "dialects", "served")


def run(checks: Checks, seeds: Sequence[int]) -> dict[str, object]:
    """Check seeds, until enough of them have failed."""
    seen, failures, done = Counter[str](), list[int](), 0
    began = time.perf_counter()
    for seed in seeds:
        report = checks.check(seed)
        done += 1
        seen += report.seen
        if report.wrong:
            failures.append(seed)
            print(f"seed {seed}\n{checks.explained(seed)}", file=sys.stderr, flush=True)
        if len(failures) >= ENOUGH_FAILURES:
            break
    return {
        "cases": done,
        "failures": failures,
        "seconds": round(time.perf_counter() - began, 1),
        "seed": seeds[0] if seeds else None,
        "seen": dict(sorted(seen.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="histories")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    with opened(arguments.kind) as checks:
        result = run(checks, seeds)
    print(json.dumps({"kind": arguments.kind, **result}))
    raise SystemExit(bool(result["failures"]))


if __name__ == "__main__":
    main()
