"""Random histories over HTTP, in process, and all that ever failed: each request gives what it
gives alone, in every API.

`python -m tests.oracle.http` runs more of them.
"""

import json
from pathlib import Path

import pytest

from tests.oracle.http.__main__ import run

FAILING = Path(__file__).with_name("failing.jsonl")  # seeds that once differed
# What the histories must meet, so that they mean something
MET = ("preemptions", "hits", "kill", "swap", "cancel")


def kept(kind: str) -> list[int]:
    lines = map(json.loads, FAILING.read_text().splitlines())
    return [each["seed"] for each in lines if each["kind"] == kind]


def test_requests_over_http_give_what_they_give_alone() -> None:
    result = run("histories", range(1, 51))
    assert not result["failures"], f"python -m tests.oracle.http --seed {result['failures']}"
    seen = result["seen"]
    assert isinstance(seen, dict) and not [kind for kind in MET if not seen.get(kind)]


def test_all_apis_tell_the_same_result() -> None:
    result = run("dialects", range(1, 13))
    assert not result["failures"], "python -m tests.oracle.http --kind dialects"


@pytest.mark.parametrize("kind", ["histories", "dialects"])
def test_seeds_that_once_differed(kind: str) -> None:
    assert not run(kind, kept(kind))["failures"]
