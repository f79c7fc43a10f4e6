"""Plants generated mistakes, runs the tests that reach them, and reports those that survive.

    python -m tests.teeth.mutants                       # in the lines that differ from main
    python -m tests.teeth.mutants --base HEAD~3
    python -m tests.teeth.mutants engine/runtime/requests engine/frontend --count 200 --seed 7
    python -m tests.teeth.mutants --written             # the list of deliberate mistakes
    python -m tests.teeth.mutants --at engine/runtime/sequence_table.py:190

Which tests reach what was measured by `python -m tests.teeth.reach TESTS`. Each verdict is a line
of `build/mutants/verdicts.jsonl`. Exit status: 1 if a mistake survived.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import pytest

from tests.teeth import warm
from tests.teeth.mutation import MACHINE
from tests.teeth.operators import Mutant, mutants_of
from tests.teeth.planted import ROOT, Planted, path_of, plant
from tests.teeth.reach import AT_IMPORT, HOME, Reach, Test, modules, record_of
from tests.teeth.warm import CAUGHT, HUNG, NOT_PLANTED, SURVIVED, Trial, Verdict, Warm

TESTS_OF_A_FILE = 12
TESTS = ("tests/unit", "tests/property", "tests/security", "tests/parity/native")
UNMEASURED = ("tests/unit/project",)  # reads the source, and runs none of it


def in_folders(areas: Sequence[str]) -> Iterator[Mutant]:
    folders = [(ROOT / each).resolve() for each in areas]
    for module, path in modules().items():
        if any(path.is_relative_to(folder) for folder in folders):
            yield from mutants_of(module, path)


def in_change(base: str) -> Iterator[Mutant]:
    """Mistakes in the lines of the working tree that differ from where it left `base`."""
    fork = _git("merge-base", base, "HEAD").strip()
    lines: dict[str, set[int]] = {}
    for line in _git("diff", "-U0", fork, "--", "engine").splitlines():
        if line.startswith("+++ "):
            current = lines.setdefault(line.removeprefix("+++ b/"), set())
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            current.update(range(first, first + count))
    for module, path in modules().items():
        touched = lines.get(str(path.relative_to(ROOT)), set())
        if touched:
            yield from (each for each in mutants_of(module, path) if each.line in touched)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Equally many of each operator, while there are, so that rare kinds are tried too."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for each in mutants:
        kinds[each.operator].append(each)
    rng = random.Random(seed)
    for kind in kinds.values():
        rng.shuffle(kind)
    turns = zip_longest(*(kinds[name] for name in sorted(kinds)))
    return [each for turn in turns for each in turn if each is not None][:count]


def likeliest(tests: Sequence[Test], module: str, most_s: float) -> list[Test]:
    """Quick tests that reach little else come first, and few of each file. Tests of a file stay
    together, since they share what they set up.
    """
    stem = module.rpartition(".")[2]
    files: dict[str, list[Test]] = defaultdict(list)
    for each in sorted(tests, key=lambda test: test.breadth * (0.05 + test.seconds)):
        if len(files[each.file]) < TESTS_OF_A_FILE:
            files[each.file].append(each)

    def rank(file: str) -> float:
        first = files[file][0]
        return first.breadth * (0.05 + first.seconds) * (0.2 if stem in file else 1)

    chosen: list[Test] = []
    left = most_s
    for file in sorted(files, key=rank):
        for each in files[file]:
            if each.seconds <= left or not chosen:
                chosen.append(each)
                left -= each.seconds
    return chosen


def trials_of(
    mutants: Sequence[Mutant], most_s: float
) -> tuple[list[Trial], list[Trial], list[Mutant]]:
    """Those for the warm process, those that are planted before any import, and what no test
    reaches.
    """
    reach = Reach(HOME / "reach")
    swapped: list[Trial] = []
    cold: list[Trial] = []
    unreached: list[Mutant] = []
    for each in mutants:
        tests = reach.tests_of(each.module, each.block, each.function)
        at_import = each.block is None or any(test.name == AT_IMPORT for test in tests)
        if at_import:
            tests = reach.tests_of(each.module, None, each.function)
        chosen = likeliest([t for t in tests if t.name != AT_IMPORT], each.module, most_s)
        if not chosen:
            unreached.append(each)
            continue
        planted = plant(each.module, each.start, each.end, each.wrong.encode())
        seconds = sum(test.seconds for test in chosen)
        trial = Trial(str(mutants.index(each)), planted, [t.name for t in chosen], seconds)
        (cold if at_import or planted.function is None else swapped).append(trial)
    return swapped, cold, unreached


def written_trials(pattern: str) -> tuple[list[Trial], list[Trial]]:
    from tests.teeth.mutations import MUTATIONS
    from tests.teeth.run import planted

    chosen = [each for each in MUTATIONS.values() if re.search(pattern, each.name)]
    trials = [Trial(each.name, planted(each), [each.caught_by], 30.0) for each in chosen]
    swapped = [each for each in trials if each.planted.function is not None]
    return swapped, [each for each in trials if each.planted.function is None]


class Report:
    def __init__(self, described: dict[str, str], areas: dict[str, str]) -> None:
        self._described = described
        self._areas = areas
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._began = time.monotonic()
        HOME.mkdir(parents=True, exist_ok=True)
        self._file = open(HOME / "verdicts.jsonl", "a")  # noqa: SIM115

    def add(self, name: str, verdict: Verdict) -> None:
        described = self._described.get(name, name)
        self._counts[self._areas.get(name, "")][verdict.outcome] += 1
        line = {"mistake": described, "outcome": verdict.outcome, "reason": verdict.reason}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if verdict.outcome not in (CAUGHT, HUNG):
            print(f"{verdict.outcome}: {described} {verdict.reason}", file=sys.__stderr__)

    def summary(self) -> str:
        heads = ("planted", "caught", "hung", "survived", "untested")
        lines = [f"{'area':32}" + "".join(f"{each:>9}" for each in heads)]
        rows = [*sorted(self._counts.items()), ("all", sum(self._counts.values(), Counter()))]
        for area, counts in rows:
            shown = [counts.total(), *(counts[each] for each in (CAUGHT, HUNG, SURVIVED))]
            shown.append(counts.total() - sum(shown[1:]))
            lines.append(f"{area:32}" + "".join(f"{each:9}" for each in shown))
        return "\n".join([*lines, f"{time.monotonic() - self._began:.0f} s"])

    def num_left(self) -> int:
        noticed = (CAUGHT, HUNG)
        return sum(n for each in self._counts.values() for o, n in each.items() if o not in noticed)


def run(swapped: Sequence[Trial], cold: Sequence[Trial], report: Report, more: list[str]) -> None:
    warm.adopt_orphans()
    last = list(cold)

    def judge(trial: Trial, verdict: Verdict) -> None:
        if verdict.outcome in (NOT_PLANTED, warm.UNTESTED):  # its tests are not collected here
            last.append(trial)
        else:
            report.add(trial.name, verdict)

    # Files whose collection fails must not end the rest.
    tests = {test.partition("::")[0] for trial in swapped for test in trial.tests}
    files = sorted(tests - {MACHINE}) or ["tests/property/test_detokenizer.py"]
    options = [*warm.OPTIONS, "--continue-on-collection-errors", *more]
    if swapped:
        pytest.main([*options, *files], plugins=[Warm(iter(swapped), judge)])
    for trial in last:
        report.add(trial.name, _in_new_process(trial))


def _in_new_process(trial: Trial) -> Verdict:
    """For what can't be exchanged: this process has imported the engine."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.teeth.mutants", "--cold"],
        cwd=ROOT,
        input=json.dumps([trial.planted.module, trial.planted.source, list(trial.tests)]),
        capture_output=True,
        text=True,
        check=True,
    )
    return Verdict(*json.loads(done.stdout.splitlines()[-1]))


def cold_from_stdin() -> int:
    module, source, tests = json.load(sys.stdin)
    warm.adopt_orphans()
    verdict = warm.cold(Trial("", Planted(module, source, None, 0), tests, 60.0))
    print(json.dumps([verdict.outcome, verdict.reason]))
    return 0


def measure_what_is_new() -> None:
    home = HOME / "reach"
    files = [path for each in TESTS for path in sorted((ROOT / each).rglob("test_*.py"))]
    names = [path.relative_to(ROOT) for path in files]
    names = [each for each in names if not str(each).startswith(UNMEASURED)]
    records = {each: record_of(home, each) for each in names}
    new = [
        str(each)
        for each, record in records.items()
        if not record.exists() or record.stat().st_mtime < (ROOT / each).stat().st_mtime
    ]
    if new:
        print(f"measuring what the tests of {len(new)} files reach", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "tests.teeth.reach", *new], cwd=ROOT, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("areas", nargs="*", help="folders or modules; else the lines that changed")
    parser.add_argument("--base", default="main", help="what a change is compared with")
    parser.add_argument("--count", type=int, default=200, help="how many mistakes, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="of tests for each mistake")
    parser.add_argument("--written", nargs="?", const="", help="the written list, or what matches")
    parser.add_argument("--at", nargs="+", default=[], help="all mistakes of these lines")
    parser.add_argument("--as-measured", action="store_true", help="measure no test again")
    parser.add_argument("--list", action="store_true", help="only list the mistakes")
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cold:
        return cold_from_stdin()
    if options.written is not None:
        swapped, cold = written_trials(options.written)
        areas = {each.name: each.planted.module for each in (*swapped, *cold)}
        report = Report({}, {name: _area(module) for name, module in areas.items()})
        run(swapped, cold, report, [])
        print(report.summary())
        return bool(report.num_left())
    return generated(options)


def generated(options: argparse.Namespace) -> int:
    if options.at:
        places = [each.partition(":") for each in options.at]
        wanted = {(str(ROOT / path), int(line)) for path, _, line in places}
        found = in_folders([path for path, _, _ in places])
        mutants = [each for each in found if (str(path_of(each.module)), each.line) in wanted]
    else:
        chosen = in_folders(options.areas) if options.areas else in_change(options.base)
        mutants = sample(chosen, options.count, options.seed)
    described = {str(i): f"{each.name}: {each.diff}" for i, each in enumerate(mutants)}
    if options.list:
        print("\n".join(described.values()))
        return 0
    if not options.as_measured:
        measure_what_is_new()
    swapped, cold, unreached = trials_of(mutants, options.seconds)
    areas = {str(i): _area(each.module) for i, each in enumerate(mutants)}
    report = Report(described, areas)
    for each in unreached:
        report.add(str(mutants.index(each)), Verdict(warm.UNTESTED, "no test reaches it"))
    run(swapped, cold, report, ["--integration", "without"])
    print(report.summary())
    print(f"seed {options.seed}")
    return bool(report.num_left())


def _area(module: str) -> str:
    return module.rpartition(".")[0]


if __name__ == "__main__":
    sys.exit(main())
