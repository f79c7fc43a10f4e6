"""How many nodes a queue needs."""

from engine.routing.ray_nodes.scaling import Autoscaler


def test_more_nodes_come_at_once_and_fewer_after_a_while() -> None:
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


def test_the_least_number_of_nodes_stays() -> None:
    scaler = Autoscaler(min_nodes=2, max_nodes=3, per_node=4, patience_s=0.0)
    assert scaler.wanted(0, 0, now=0.0) == 2
    assert scaler.wanted(3, 0, now=1.0) == 2
