"""Measures figures: `python -m tests.scoreboard [R01 R05 ...] [--quick] [--seed N] [--write]
[--list]`.

Each figure prints one line of JSON. The exit status is 1 if a limit was broken. `--write` updates
the measured figures in docs/scoreboard.md and keeps the others.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from tests.scoreboard.figure import all_figures
from tests.scoreboard.record import keep_seeds, write_page


def commit() -> str:
    """The commit of the measured code; "+" marks uncommitted changes."""
    name = _git("rev-parse", "--short", "HEAD")
    return name + "+" if name and _git("status", "--porcelain", "--untracked-files=no") else name


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scoreboard", description=__doc__)
    parser.add_argument("ids", nargs="*", help="all, unless some are named")
    parser.add_argument("--quick", action="store_true", help="few cases each")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--write", action="store_true", help="update docs/scoreboard.md")
    parser.add_argument("--list", action="store_true", help="say what there is")
    asked = parser.parse_args()
    figures = all_figures()
    if unknown := set(asked.ids) - set(figures):
        parser.error(f"there is no {', '.join(sorted(unknown))}; --list shows what there is")
    if asked.list:
        for each in figures.values():
            print(f"{each.id}  {each.minutes:5.1f} min  {each.name}")
        return 0
    chosen = [each for each in figures.values() if not asked.ids or each.id in asked.ids]
    results: list[dict[str, Any]] = []
    at = commit()
    for each in chosen:
        result = each.take(asked.seed, quick=asked.quick) | {"commit": at}
        print(json.dumps(result), flush=True)
        results.append(result)
        keep_seeds(result, has_case=each.case is not None)
    if asked.write and not asked.quick:
        write_page(results)
    return 0 if all(result["pass"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
