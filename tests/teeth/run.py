"""Applies one mutation, in this process and in its children, and runs what should detect it.

    python -m tests.teeth.run "INV-01 blocks leak"

Exit status: 0 detected, 1 not detected, 2 the source has changed: the mutation no longer applies.
"""

import importlib.abc
import importlib.machinery
import linecache
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from tests.teeth.mutation import MACHINE, SCHEDULES, Mutation
from tests.teeth.mutations import MUTATIONS

NOTICED, UNNOTICED, STALE = 0, 1, 2
NUM_STEPS = 15_000
NUM_SCHEDULES = 300


class _Loader(importlib.machinery.SourceFileLoader):
    mutation: Mutation

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        wrong = source.replace(self.mutation.right, self.mutation.wrong)
        # For tests that read the source; with no mtime, linecache does not compare it with the
        # file.
        linecache.cache[self.path] = (len(wrong), None, wrong.splitlines(True), self.path)
        return compile(wrong, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin)
        spec.loader.mutation = self._mutation
        return spec


def applies(mutation: Mutation) -> bool:
    """Whether the piece of source occurs exactly once; found without importing the module."""
    path = mutation.module.replace(".", "/") + ".py"
    with open(path, encoding="utf-8") as file:
        return mutation.right != mutation.wrong and file.read().count(mutation.right) == 1


def is_noticed(mutation: Mutation) -> bool:
    if mutation.caught_by == MACHINE:
        from tests.property import run_machine

        return bool(run_machine.run(NUM_STEPS, first_seed=1)["violations"])
    if mutation.caught_by == SCHEDULES:
        from tests.property import run_schedules

        try:
            return bool(run_schedules.run("toy", NUM_SCHEDULES, seed=1)["mismatches"])
        except Exception:
            return True
    import pytest

    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", mutation.caught_by])
    return status == pytest.ExitCode.TESTS_FAILED


def main(name: str) -> int:
    mutation = MUTATIONS[name]
    if not applies(mutation):
        print(f"{mutation.module} no longer has what {name!r} replaces; mend the list")
        return STALE
    install(mutation)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        hand_on(mutation, Path(folder))
        return NOTICED if is_noticed(mutation) else UNNOTICED


def install(mutation: Mutation) -> None:
    sys.meta_path.insert(0, _Finder(mutation))


def hand_on(mutation: Mutation, folder: Path) -> None:
    """Apply the mutation in every child interpreter too: each runs this file first."""
    lines = (
        "from tests.teeth.mutations import MUTATIONS",
        "from tests.teeth.run import install",
        f"install(MUTATIONS[{mutation.name!r}])",
    )
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), os.getcwd()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
