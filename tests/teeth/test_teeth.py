"""The suite has teeth: each mutation on the list turns a test red."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_mutant_is_caught_by_its_test() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.teeth.mutants", "--written"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
