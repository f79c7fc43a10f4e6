"""Checks random histories, and prints one line of JSON.

Each failing history is made small and printed, also as a line to keep in `failing.jsonl`.

    python -m tests.oracle --level toy --cases 100000 --seed 1
    python -m tests.oracle --level toy --seed 17 --only
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from functools import lru_cache
from typing import Any

from tests.oracle.check import Oracle
from tests.oracle.histories import POOL_HISTORIES, History, Pool, Stage, draw_history, draw_pool
from tests.oracle.level import LEVELS, Level
from tests.oracle.shrink import shrunk

ENOUGH_FAILURES = 5


def drawn(oracle: Oracle, seed: int) -> History:
    """The history of a seed."""
    level = oracle.level
    pool = _pool(level.name, level.stage, seed // POOL_HISTORIES)
    return draw_history(random.Random(f"{level.name} {seed}"), level.stage, pool)


@lru_cache(maxsize=1)
def _pool(name: str, stage: Stage, number: int) -> Pool:
    return draw_pool(random.Random(f"{name} pool {number}"), stage)


def failing(oracle: Oracle, history: History, seed: int) -> list[str]:
    """What is wrong with a history."""
    return oracle.check(history, str(seed)).wrong


def explained(oracle: Oracle, seed: int) -> str:
    """A small history that fails like that of the seed, and what is wrong with it."""
    small = shrunk(drawn(oracle, seed), lambda each: bool(failing(oracle, each, seed)))
    wrong = failing(oracle, small, seed)
    kept = {"level": oracle.level.name, "was": wrong[0], "history": small.to_json()}
    told = "\n  ".join(wrong)
    return f"seed {seed} of level {oracle.level.name}\n{small}\n  {told}\n{json.dumps(kept)}"


def run(
    level: Level, seeds: range, *, shrinks: bool = True, enough: int = ENOUGH_FAILURES
) -> dict[str, Any]:
    """Check the histories of seeds, until enough of them have failed."""
    oracle, seen, failures = Oracle(level), Counter[str](), list[int]()
    began, done = time.perf_counter(), 0
    for seed in seeds:
        report = oracle.check(drawn(oracle, seed), str(seed))
        done += 1
        seen += report.seen
        if report.wrong:
            failures.append(seed)
            if shrinks:
                print(explained(oracle, seed), file=sys.stderr, flush=True)
        if len(failures) >= enough:
            break
    oracle.close()
    return {
        "level": level.name,
        "histories": done,
        "failures": failures,
        "seconds": round(time.perf_counter() - began, 1),
        "seed": seeds.start,
        "seen": dict(sorted(seen.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", choices=sorted(LEVELS), default="toy")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="store_true", help="this seed alone")
    arguments = parser.parse_args()
    cases = 1 if arguments.only else arguments.cases
    result = run(LEVELS[arguments.level](), range(arguments.seed, arguments.seed + cases))
    print(json.dumps(result))
    raise SystemExit(bool(result["failures"]))


if __name__ == "__main__":
    main()
