"""The suite has teeth: each mutation on the list turns a test red."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.teeth.mutations import MUTATIONS
from tests.teeth.run import NOTICED

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutant_is_caught_by_its_test(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.teeth.run", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == NOTICED, done.stdout[-2000:] + done.stderr[-2000:]
