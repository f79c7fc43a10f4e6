"""How many nodes a queue needs, and what is told while there are too few. Ray is not needed."""

import logging
from pathlib import Path

import pytest

from engine.core.errors import UnavailableError
from engine.routing.nodes.dial import read_token
from engine.routing.ray_nodes.actors import _memory_file
from engine.routing.ray_nodes.launcher import NodePlan, _check_reachable
from engine.routing.ray_nodes.scaling import Autoscaler, Scaling
from tests.support.servers.live_server import free_port

PLAN = NodePlan("token", (), num_gpus=1, num_ranks=2)


class FakeNodes:
    """A cluster that has room for some nodes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.count = 0
        self.said: dict[str, str] = {}

    def names(self) -> list[str]:
        return [f"node-{number}" for number in range(self.count)]

    def waiting(self) -> list[str]:
        return self.names()[self.room :]

    def failures(self) -> dict[str, str]:
        return self.said

    def remind(self) -> None:
        pass

    def scale_to(self, count: int, plan: NodePlan) -> None:
        assert plan is PLAN
        self.count = count


def test_nodes_are_added_at_once_and_removed_after_a_delay() -> None:
    scaler = Autoscaler(min_nodes=0, max_nodes=3, per_node=4, patience_s=10.0)
    assert scaler.wanted(0, 0, now=0.0) == 0
    assert scaler.wanted(0, 1, now=1.0) == 1
    assert scaler.wanted(1, 9, now=2.0) == 3
    assert scaler.wanted(3, 90, now=3.0) == 3
    assert scaler.wanted(3, 2, now=4.0) == 3  # the load may come back
    assert scaler.wanted(3, 9, now=12.0) == 3  # it did, so the wait begins again
    assert scaler.wanted(3, 0, now=13.0) == 3
    assert scaler.wanted(3, 0, now=22.9) == 3
    assert scaler.wanted(3, 0, now=23.0) == 0


def test_the_minimum_number_of_nodes_stays() -> None:
    scaler = Autoscaler(min_nodes=2, max_nodes=3, per_node=4, patience_s=0.0)
    assert scaler.wanted(0, 0, now=0.0) == 2
    assert scaler.wanted(3, 0, now=1.0) == 2


def test_scaling_follows_the_queue_and_logs_each_problem_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    nodes, asked = FakeNodes(room=1), [0]

    def count_open() -> int:
        if asked[0] < 0:
            raise UnavailableError("the server is away")
        return asked[0]

    scaling = Scaling(nodes, PLAN, Autoscaler(0, 4, 2, patience_s=0.0), count_open)  # type: ignore[arg-type]
    scaling.step(0.0)
    assert nodes.count == 0 and not caplog.records
    asked[0] = 5
    for now in (1.0, 2.0):
        scaling.step(now)
    assert nodes.count == 3
    (told,) = caplog.messages
    assert told == "no room in the Ray cluster for node-1, node-2 (2 x (1 CPU, 1 GPU) each)"
    asked[0] = -1
    for now in (3.0, 4.0):
        scaling.step(now)
    assert nodes.count == 3, "a server that is away is no reason to stop nodes"
    assert caplog.messages[1:] == ["the server is away"]
    asked[0], nodes.said = 1, {"node-0": "the token is wrong"}
    scaling.step(5.0)
    assert nodes.count == 1
    assert caplog.messages[2:] == ["node-0 failed: the token is wrong"]


def test_a_ray_actors_token_is_never_written_to_disk() -> None:
    path = Path(_memory_file("a-token-of-some-length"))
    assert read_token(path) == "a-token-of-some-length"
    assert "memfd:" in str(path.readlink())


def test_an_unreachable_ray_address_is_reported_at_once() -> None:
    """Ray tries for more than ten minutes."""
    with pytest.raises(UnavailableError, match=r"No Ray cluster answers at 127\.0\.0\.1:"):
        _check_reachable(f"127.0.0.1:{free_port()}")
    _check_reachable("auto")
