"""Random histories of each level, and all that ever failed: each request gives what it gives alone.

`python -m tests.oracle` runs more of them.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.__main__ import drawn, run
from tests.oracle.check import Oracle
from tests.oracle.histories import POOL_HISTORIES, History
from tests.oracle.level import LEVELS
from tests.oracle.toy import ToyLevel
from tests.support.servers.redis_server import PROGRAM, RedisServer

# Histories that once differed, each with what was wrong
FAILING = Path(__file__).with_name("failing.jsonl")
# What the histories of a level must meet, so that they mean something
MET = ("preemptions", "hits", "loads", "revivals", "accepted", "rejected", "swap", "nan", "cancel")
MET += ("lose_node", "exact")


def kept() -> list[tuple[str, str, History]]:
    lines = map(json.loads, FAILING.read_text().splitlines())
    return [(each["level"], each["was"], History.from_json(each["history"])) for each in lines]


def test_toy_requests_give_what_they_give_alone() -> None:
    result = run(LEVELS["toy"](), range(1, 361))
    assert not result["failures"], f"python -m tests.oracle --only --seed {result['failures'][0]}"
    assert not [kind for kind in MET if not result["seen"].get(kind)]


@pytest.mark.seconds
@pytest.mark.parametrize("level", ["native", pytest.param("torch", marks=pytest.mark.integration)])
def test_tiny_models_requests_give_what_they_give_alone(level: str) -> None:
    """One history of each of several pools, whose models differ."""
    result = run(LEVELS[level](), range(0, 16 * POOL_HISTORIES, POOL_HISTORIES))
    assert not result["failures"], (level, result["failures"])
    assert result["seen"]["revivals"] and result["seen"]["hits"]


@pytest.mark.integration
@pytest.mark.skipif(PROGRAM is None, reason="needs redis-server")
def test_toy_requests_give_what_they_give_alone_with_redis(tmp_path: Path) -> None:
    level, redis = ToyLevel(), RedisServer(tmp_path)
    shapes = {**level.stage.shapes, "tiers": ("redis", "host redis"), "sharing": (True,)}
    level.stage, level.redis = replace(level.stage, shapes=shapes), redis.client
    try:
        result = run(level, range(1, 151))
    finally:
        redis.stop()
    assert not result["failures"] and result["seen"]["loads"]


@pytest.mark.parametrize(("level", "was", "history"), kept())
def test_a_history_that_once_differed(level: str, was: str, history: History) -> None:
    assert not Oracle(LEVELS[level]()).check(history, "kept").wrong, f"{was}\n{history}"


def test_a_history_is_the_same_after_json() -> None:
    oracle = Oracle(LEVELS["toy"]())
    for seed in range(20):
        history = drawn(oracle, seed)
        again = History.from_json(json.loads(json.dumps(history.to_json())))
        assert again.to_json() == history.to_json() and str(again) == str(history)
