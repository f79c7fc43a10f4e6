"""Checks random histories over HTTP in process, and prints one line of JSON.

Each failing history is made small and printed. Its seed can be kept in `failing.jsonl`.

    python -m tests.oracle.http --cases 2000 --seed 1
    python -m tests.oracle.http --kind dialects --cases 300
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.oracle.check import Report
from tests.oracle.histories import History, draw_history
from tests.oracle.http.check import STAGE, HttpOracle
from tests.oracle.http.dialects import dialect_problems, draw_for_dialects
from tests.oracle.http.toy_server import toy_server
from tests.oracle.shrink import shrunk

ENOUGH_FAILURES = 5


def drawn_history(seed: int) -> History:
    """The history of a seed."""
    return draw_history(random.Random(f"http {seed}"), STAGE)


def check_histories(oracle: HttpOracle, seed: int) -> Report:
    return oracle.check(drawn_history(seed))


def check_dialects(oracle: HttpOracle, seed: int) -> Report:
    drawn = draw_for_dialects(seed)
    return Report(
        oracle.run(dialect_problems(oracle, drawn)), Counter(dict.fromkeys(drawn.features, 1))
    )


CHECKS: dict[str, Callable[[HttpOracle, int], Report]] = {
    "histories": check_histories,
    "dialects": check_dialects,
}


def explained(oracle: HttpOracle, kind: str, seed: int) -> str:
    """What is wrong with a seed: a small history that fails, or the request."""
    if kind == "dialects":
        drawn = draw_for_dialects(seed)
        wrong = check_dialects(oracle, seed).wrong
        return "\n  ".join([f"seed {seed}: {list(drawn.prompt)} {drawn.features}", *wrong])
    small = shrunk(drawn_history(seed), lambda each: bool(oracle.check(each).wrong))
    return "\n  ".join([f"seed {seed}\n{small}", *oracle.check(small).wrong])


def run(kind: str, seeds: range, *, shrinks: bool = True) -> dict[str, object]:
    """Check seeds, until enough of them have failed."""
    seen, failures, done = Counter[str](), list[int](), 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, toy_server(Path(name)) as server:
        oracle = HttpOracle(server)
        for seed in seeds:
            report = CHECKS[kind](oracle, seed)
            done += 1
            seen += report.seen
            if report.wrong:
                failures.append(seed)
                if shrinks:
                    print(explained(oracle, kind, seed), file=sys.stderr, flush=True)
            if len(failures) >= ENOUGH_FAILURES:
                break
    return {
        "kind": kind,
        "cases": done,
        "failures": failures,
        "seconds": round(time.perf_counter() - began, 1),
        "seed": seeds.start,
        "seen": dict(sorted(seen.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(CHECKS), default="histories")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    result = run(arguments.kind, seeds)
    print(json.dumps(result))
    raise SystemExit(bool(result["failures"]))


if __name__ == "__main__":
    main()
