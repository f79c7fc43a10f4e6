"""A router behind the server: what clients see of it, and what `/v1/admin/routes` tells."""

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from engine.core.errors import UnavailableError
from engine.core.observability.metrics import Metrics
from engine.routing.metrics import RouterMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.route import Route
from engine.routing.router import Router
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.servers.live_server import events_of, make_settings

KEY = "k" * 32


class Setup:
    """Model `a` (also `x`) on two backends, `b` behind it on a third."""

    def __init__(self, **server: Any) -> None:
        self.fakes = [FakeBackend() for _ in range(3)]
        self.replicas = [Replica(f"f#{n}", "fake", each) for n, each in enumerate(self.fakes)]
        for replica in self.replicas:
            replica.has_started = True
        members = [Member(each, 1.0) for each in self.replicas]
        policy = "round_robin"
        routes = [
            Route("a", members[:2], policy, make_policy(policy), aliases=("x",), fallbacks=("b",)),
            Route("b", members[2:], policy, make_policy(policy)),
        ]
        self.router = Router(self.replicas, routes, RouterMetrics(CollectorRegistry()))
        settings = make_settings(server=server)
        self.app = create_app(settings, self.router, Metrics("a"))

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    async def chat(self, model: str = "a", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.ask("POST", "/v1/chat/completions", json=body)


@pytest.fixture
def setup() -> Setup:
    return Setup()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_response_header_names_the_backend_that_answered(
    setup: Setup, stream: bool
) -> None:
    setup.fakes[0].refusal = UnavailableError("gone")
    reply = await setup.chat(stream=stream)
    assert reply.status_code == 200 and reply.headers["x-engine-backend"] == "f#1"
    if stream:
        assert events_of(reply.text)[-1] == "[DONE]"


async def test_the_backend_header_names_the_backend_of_every_prompt(setup: Setup) -> None:
    reply = await setup.ask(
        "POST", "/v1/completions", json={"model": "a", "prompt": ["p", "q"], "max_tokens": 1}
    )
    assert reply.headers["x-engine-backend"] == "f#0, f#1"
    explained = await setup.ask("GET", f"/v1/admin/routes/{reply.json()['id']}")
    assert [each["chosen"] for each in explained.json()["decisions"]] == ["f#0", "f#1"]


async def test_the_backend_header_is_set_by_all_apis(setup: Setup) -> None:
    body = {"model": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    for path, fields in {
        "/v1/messages": body,
        "/v1/responses": {"model": "a", "input": "hi", "store": False},
        "/v1/embeddings": {"model": "a", "input": "hi"},
    }.items():
        reply = await setup.ask("POST", path, json=fields)
        assert reply.status_code == 200 and "x-engine-backend" in reply.headers, path


async def test_an_alias_is_served_like_a_model_name(setup: Setup) -> None:
    reply = await setup.chat("x")
    assert reply.json()["model"] == "x" and "x-engine-warnings" not in reply.headers
    listed = (await setup.ask("GET", "/v1/models")).json()["data"]
    assert [(each["id"], each["root"]) for each in listed] == [("a", "a"), ("x", "a"), ("b", "b")]
    assert (await setup.ask("GET", "/v1/models/x")).json()["root"] == "a"
    assert setup.router.decisions.newest(1)[0].model == "a"


async def test_a_fallback_model_is_named_in_the_body_and_warning_header(setup: Setup) -> None:
    for each in setup.fakes[:2]:
        each.ready = False
    reply = await setup.chat("x")
    assert reply.status_code == 200 and reply.json()["model"] == "b"
    assert "model: no backend of a is up; b answers" in reply.headers["x-engine-warnings"]
    assert reply.headers["x-engine-backend"] == "f#2"
    states = {
        each["id"]: each["state"] for each in (await setup.ask("GET", "/v1/models")).json()["data"]
    }
    assert states == {"a": "loading", "x": "loading", "b": "loaded"}


async def test_a_strict_server_refuses_to_fall_back() -> None:
    setup = Setup(strict=True)
    for each in setup.fakes[:2]:
        each.ready = False
    reply = await setup.chat()
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "model"


async def test_a_model_that_is_down_is_503_while_others_answer(setup: Setup) -> None:
    setup.fakes[2].ready = False
    reply = await setup.chat("b")
    assert reply.status_code == 503 and "retry-after" in reply.headers
    assert "x-engine-backend" not in reply.headers
    assert (await setup.chat("a")).status_code == 200
    assert (await setup.ask("GET", "/readyz")).status_code == 200


async def test_unknown_models_are_refused_with_the_known_names(setup: Setup) -> None:
    reply = await setup.chat("nothing")
    assert reply.status_code == 404 and "a, x, b" in reply.json()["error"]["message"]


async def test_a_routing_decision_is_found_by_either_id(setup: Setup) -> None:
    reply = await setup.chat()
    for name in (reply.json()["id"], reply.headers["x-request-id"]):
        (told,) = (await setup.ask("GET", f"/v1/admin/routes/{name}")).json()["decisions"]
        assert told["chosen"] == "f#0" and "f#0 was chosen" in told["explanation"]
    missing = await setup.ask("GET", "/v1/admin/routes/none")
    assert missing.status_code == 404


async def test_admin_routes_have_every_field_of_the_dashboard(setup: Setup) -> None:
    await setup.chat()
    told = (await setup.ask("GET", "/v1/admin/routes")).json()
    first = told["models"][0]
    assert set(first) == {"id", "aliases", "policy", "fallbacks", "shadow", "backends"}
    assert set(first["backends"][0]) == {
        *("name", "kind", "weight", "tags", "state", "detail", "in_flight", "max_concurrent"),
        *("requests", "failures", "restarts", "tokens_per_s", "ttft_p50_s", "prefix_hit_rate"),
    }
    assert told["decisions"][0]["chosen"] == "f#0"


async def test_requests_of_engine_top_are_not_logged_unless_they_fail(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.request")
    for path in ("/v1/admin/routes", "/v1/models", "/health", "/metrics"):
        assert (await setup.ask("GET", path)).status_code == 200
    assert not caplog.records
    assert (await setup.ask("GET", "/v1/models/none")).status_code == 404
    assert (await setup.ask("POST", "/v1/models")).status_code == 405
    assert len(caplog.records) == 2


async def test_admin_routes_need_the_key() -> None:
    setup = Setup(api_key=KEY)
    for path in ("/v1/admin/routes", "/v1/admin/routes/x"):
        assert (await setup.ask("GET", path)).status_code == 401
        allowed = await setup.ask("GET", path, headers={"authorization": f"Bearer {KEY}"})
        assert allowed.status_code in (200, 404)


async def test_admin_routes_have_the_same_shape_without_a_router(setup: Setup) -> None:
    setup.app = create_app(make_settings(), FakeBackend(), Metrics("m"))
    routed = Setup()
    alone = (await setup.ask("GET", "/v1/admin/routes")).json()
    several = (await routed.ask("GET", "/v1/admin/routes")).json()
    assert set(alone) == set(several)
    assert set(alone["models"][0]) == set(several["models"][0])
    assert set(alone["models"][0]["backends"][0]) == set(several["models"][0]["backends"][0])
    assert "x-engine-backend" not in (await setup.chat("tests/fake-model")).headers
