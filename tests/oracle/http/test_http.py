"""Random histories over HTTP, in process, and all that ever failed: each request gives what it
gives alone, in every API.

`python -m tests.oracle.http` runs more of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oracle.histories import History
from tests.oracle.http.__main__ import Dialects, Histories, run
from tests.oracle.http.check import HttpOracle
from tests.oracle.http.toy_server import toy_server

# Histories that once differed, each with what was wrong
FAILING = Path(__file__).with_name("failing.jsonl")
# What the histories must meet, so that they mean something
MET = ("preemptions", "hits", "kill", "swap", "cancel")


def kept() -> list[tuple[str, History]]:
    lines = map(json.loads, FAILING.read_text().splitlines())
    return [(each["was"], History.from_json(each["history"])) for each in lines]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpOracle]:
    with toy_server(tmp_path_factory.mktemp("toy")) as server:
        yield HttpOracle(server)


def test_requests_over_http_give_what_they_give_alone(oracle: HttpOracle) -> None:
    result = run(Histories(oracle), range(39, 89))
    assert not result["failures"], f"python -m tests.oracle.http --seed {result['failures']}"
    seen = result["seen"]
    assert isinstance(seen, dict) and not [kind for kind in MET if not seen.get(kind)]


def test_all_apis_tell_the_same_result(oracle: HttpOracle) -> None:
    result = run(Dialects(oracle), range(1, 13))
    assert not result["failures"], "python -m tests.oracle.http --kind dialects"


@pytest.mark.parametrize(("was", "history"), kept())
def test_a_history_that_once_differed(oracle: HttpOracle, was: str, history: History) -> None:
    assert not oracle.check(history).wrong, f"{was}\n{history}"
