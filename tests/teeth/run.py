"""Applies one mutation, in this process and in its children, and runs what should detect it.

    python -m tests.teeth.run "INV-01 blocks leak"

Exit status: 0 detected, 1 not detected, 2 the source has changed: the mutation no longer applies.
"""

import logging
import sys
import tempfile
from pathlib import Path

from tests.teeth.mutation import MACHINE, Mutation
from tests.teeth.mutations import MUTATIONS
from tests.teeth.planted import Planted, hand_on, install, path_of, plant

NOTICED, UNNOTICED, STALE = 0, 1, 2
NUM_STEPS = 15_000


def applies(mutation: Mutation) -> bool:
    """Whether the piece of source occurs exactly once; found without importing the module."""
    source = path_of(mutation.module).read_text()
    return mutation.right != mutation.wrong and source.count(mutation.right) == 1


def planted(mutation: Mutation) -> Planted:
    right = mutation.right.encode()
    start = path_of(mutation.module).read_bytes().index(right)
    return plant(mutation.module, start, start + len(right), mutation.wrong.encode())


def is_noticed(caught_by: str) -> bool:
    logging.disable(logging.CRITICAL)
    if caught_by == MACHINE:
        from tests.property import run_machine

        return bool(run_machine.run(NUM_STEPS, first_seed=1)["violations"])
    import pytest

    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", caught_by])
    return status == pytest.ExitCode.TESTS_FAILED


def main(name: str) -> int:
    mutation = MUTATIONS[name]
    if not applies(mutation):
        print(f"{mutation.module} no longer has what {name!r} replaces; mend the list")
        return STALE
    wrong = planted(mutation)
    install(wrong.module, wrong.source)
    with tempfile.TemporaryDirectory() as folder:
        hand_on(wrong, Path(folder))
        return NOTICED if is_noticed(mutation.caught_by) else UNNOTICED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
