"""Runs everything that needs a GPU machine, one process after the other, and prints a summary.

    python -m benchmarks.gpu.suite --output results

It runs the kernels against their references, the tests marked `gpu`, greedy ids and logprob drift
against the reference attention path, the speed of each kernel, and all workloads. Missed bars are
only shown; the exit status is 1 if a result is wrong or a stage did not run.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.workloads import SHAPES

ROOT = Path(__file__).parents[2]
STAGE_SECONDS = 1800
NO_TESTS = 5  # pytest's exit status


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    command: tuple[str, ...]  # arguments for this Python
    report: Path | None = None  # JSON file that the stage writes
    tell: Callable[[Any], str] | None = None  # summarizes the report in a line


@dataclass(frozen=True, slots=True)
class Outcome:
    stage: Stage
    status: int
    seconds: float
    last_line: str

    @property
    def passed(self) -> bool:
        return self.status == 0


def stages(models: Sequence[str], folder: Path, device: str, repeats: int) -> list[Stage]:
    # Ignore the project's own options, which need plugins that a GPU machine may lack.
    pytest = ("-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib")
    found = [
        Stage("kernels against references", (*pytest, "tests/kernels")),
        Stage("tests marked gpu", (*pytest, "-m", "gpu", *marked_tests())),
    ]
    for model in models:
        path = folder / f"correctness-{model}.json"
        command = ("-m", "benchmarks.gpu.correctness", "--model", model, "--device", device)
        command += ("--output", str(path))
        found.append(Stage(f"correctness, {model}", command, path, tell_checks))
    if device != "cpu":  # interpreted kernels have no meaningful speed
        path = folder / "kernels.json"
        command = ("-m", "benchmarks.gpu.kernels", "--check", "--json", str(path))
        found.append(Stage("speed of kernels", command, path, tell_kernels))
    for model in models:
        path = folder / f"workloads-{model}.json"
        command = ("-m", "benchmarks.gpu.run", "--model", model, "--device", device)
        command += ("--repeats", str(repeats), "--output", str(path))
        found.append(Stage(f"workloads, {model}", command, path, tell_workloads))
    return found


def marked_tests() -> list[str]:
    """Test files that need a CUDA device; others may need packages that a GPU machine lacks."""
    paths = sorted(ROOT.glob("tests/*/test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]


def run(stage: Stage, folder: Path) -> Outcome:
    """Run the stage. Its output is shown as it arrives, and stored beside its report."""
    began = time.perf_counter()
    last = ""
    if stage.report is not None:
        stage.report.unlink(missing_ok=True)
    name = stage.name.replace(",", "").replace(" ", "-")
    with open(folder / f"{name}.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *stage.command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        limit = threading.Timer(STAGE_SECONDS, process.kill)
        limit.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            last = line.strip() or last
        status = process.wait()
        limit.cancel()
    if status == NO_TESTS and "pytest" in stage.command:
        status, last = 0, "no test is marked"
    return Outcome(stage, status, time.perf_counter() - began, last)


def summary(outcomes: Sequence[Outcome]) -> Table:
    table = Table("stage", "", "seconds", "", box=None, title="Summary", title_justify="left")
    for outcome in outcomes:
        verdict = "ok" if outcome.passed else f"FAILED ({outcome.status})"
        table.add_row(outcome.stage.name, verdict, f"{outcome.seconds:.0f}", told(outcome))
    return table


def told(outcome: Outcome) -> str:
    """A summary of the stage's report, or the last line of its output."""
    stage = outcome.stage
    if stage.report is None or stage.tell is None or not stage.report.exists():
        return outcome.last_line
    return stage.tell(json.loads(stage.report.read_text()))


def tell_checks(report: Any) -> str:
    return "\n".join(f"{each['name']}: {each['detail']}" for each in report)


def tell_kernels(report: Any) -> str:
    failed = [f"{row['kernel']} {row['example']}" for row in report if "error" in row]
    slow = [row for row in report if row.get("reference_us", row.get("us", 0)) < row.get("us", 0)]
    text = f"{len(report)} examples, {len(slow)} slower than PyTorch's own"
    return text + (f"; failed: {', '.join(failed)}" if failed else "")


def tell_workloads(report: Any) -> str:
    judged = [row for row in report["rows"] if row["meets_bar"] is not None]
    missed = [row["name"] for row in judged if not row["meets_bar"]]
    text = f"{len(judged) - len(missed)} of {len(judged)} bars met"
    return text + (f"; missed: {', '.join(missed)}" if missed else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["llama-1b", "llama-8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3, help="of every workload")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="stages whose name has a word")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    given = parser.parse_args()
    folder = given.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for stage in stages(given.models, folder, given.device, given.repeats):
        if not given.only or any(word in stage.name for word in given.only):
            print(f"\n==> {stage.name}", flush=True)
            outcomes.append(run(stage, folder))
    Console(width=160).print("", summary(outcomes))
    sys.exit(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    main()
