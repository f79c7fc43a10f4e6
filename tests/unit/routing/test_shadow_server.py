"""Shadow traffic behind a server and its router: what clients, operators and a shadow that hangs or
fails see of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from engine.core.errors import UnavailableError
from engine.routing.metrics import RouterMetrics, ShadowMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.route import Route
from engine.routing.router import Router
from engine.routing.shadow.traffic import MAX_CONCURRENT, Shadow, ShadowRoute
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.servers.live_server import LiveServer, events_of, live_server, wait_until

pytestmark = pytest.mark.seconds  # each test starts several servers

NUM_REQUESTS = 12


class Shadowed:
    """A server of the model `m`: a primary answers, a shadow gets copies of everything."""

    def __init__(self, primary: FakeBackend, shadow: FakeBackend) -> None:
        registry = CollectorRegistry()
        replica = Replica("first", "fake", primary)
        route = Route("m", [Member(replica, 1.0)], "round_robin", make_policy("round_robin"))
        routes = [ShadowRoute("m", "second", (shadow,), 1.0)]
        self.router = Router(
            [replica, Replica("second", "fake", shadow)],
            [route],
            RouterMetrics(registry),
            Shadow(routes, ShadowMetrics(registry)),
        )
        for each in self.router.replicas:
            each.has_started = True
        self.registry = registry
        self.primary, self.shadow = primary, shadow

    @contextmanager
    def served(self) -> Iterator[LiveServer]:
        with live_server(self.router) as server:
            yield server


@pytest.fixture
def shadowed() -> Shadowed:
    return Shadowed(FakeBackend(), FakeBackend())


def ask(server: LiveServer, **fields: Any) -> httpx.Response:
    message = {"role": "user", "content": "say hello"}
    body = {"model": "m", "messages": [message], "temperature": 0} | fields
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)


def lane(server: LiveServer) -> dict[str, Any]:
    (model,) = httpx.get(f"{server.url}/v1/admin/shadow").json()["models"]
    return model


def wait_for_outcomes(server: LiveServer, expected: dict[str, int]) -> None:
    wait_until(lambda: lane(server)["outcomes"] == expected)


def test_shadow_answers_are_compared_for_streams_and_whole_answers(shadowed):
    shadowed.shadow.words = ("Hello", " there")
    with shadowed.served() as server:
        streamed = events_of(ask(server, stream=True).text)
        assert ask(server).json()["choices"][0]["message"]["content"] == "Hello from a fake model."
        wait_for_outcomes(server, {"different": 2})
        report = httpx.get(f"{server.url}/v1/admin/shadow").json()
    assert streamed[-1] == "[DONE]"
    newest = report["recent"][0]
    assert (newest["model"], newest["backend"], newest["first_divergence_token"]) == (
        "m",
        "second",
        1,
    )
    assert newest["request_id"].startswith("chatcmpl-")
    labels = {"model_name": "m", "backend": "second", "outcome": "different"}
    assert shadowed.registry.get_sample_value("engine_shadow_requests_total", labels) == 2


def test_a_hanging_shadow_delays_no_client(shadowed):
    shadowed.shadow.prefill_s = 3600
    with shadowed.served() as server:
        for _ in range(NUM_REQUESTS):
            assert ask(server).status_code == 200
        found = lane(server)
        assert (found["in_flight"], found["waiting"]) == (
            MAX_CONCURRENT,
            NUM_REQUESTS - MAX_CONCURRENT,
        )
        assert shadowed.primary.num_open == 0


def test_a_failing_shadow_affects_no_client(shadowed):
    faults = [
        {"refusal": UnavailableError("no")},
        {"failure": UnavailableError("it died"), "fail_after": 2},
        {"failure": RuntimeError("a bug")},
        {"ready": False},
    ]
    with shadowed.served() as server:
        for number, fault in enumerate(faults, 1):
            shadowed.shadow.reset()
            for name, value in fault.items():
                setattr(shadowed.shadow, name, value)
            for stream in (False, True):
                answer = ask(server, stream=stream)
                assert answer.status_code == 200 and "model" in answer.text
            wait_until(lambda count=2 * number: sum(lane(server)["outcomes"].values()) == count)
        assert lane(server)["outcomes"] == {"error": 6, "unavailable": 2}
        routes = httpx.get(f"{server.url}/v1/admin/routes").json()
    (member,) = routes["models"][0]["backends"]
    assert (member["name"], member["failures"]) == ("first", 0)


def test_a_failed_or_cancelled_request_has_no_shadow_copy(shadowed):
    shadowed.primary.failure, shadowed.primary.fail_after = UnavailableError("it died"), 2
    with shadowed.served() as server:
        assert ask(server).status_code == 503
        shadowed.primary.failure = None
        shadowed.primary.token_s = 3600
        with server.connect() as connection:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
            server.post_raw(connection, "/v1/chat/completions", body)
            wait_until(lambda: shadowed.primary.num_open == 1)
        wait_until(lambda: shadowed.primary.num_open == 0)
        shadowed.primary.token_s = 0
        assert ask(server).status_code == 200
        wait_for_outcomes(server, {"identical": 1})
    assert len(shadowed.shadow.requests) == 1


def test_a_server_without_a_shadow_reports_an_empty_list():
    with live_server() as server:
        assert httpx.get(f"{server.url}/v1/admin/shadow").json() == {"models": [], "recent": []}
