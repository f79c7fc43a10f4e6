"""The generator of hostile requests: what a seed decides, and what it leaves out."""

import httpx
import pytest

from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.openapi import document
from tests.scoreboard.hostile.cases import Answer
from tests.scoreboard.hostile.fields import Known
from tests.scoreboard.hostile.requests import Generator
from tests.scoreboard.hostile.victim import fault_of
from tests.scoreboard.http.bodies import least_bodies
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

APP = create_app(make_settings(), FakeBackend(), Metrics(MODEL))
DESCRIPTION = document(APP)


def test_a_seed_always_makes_the_same_request() -> None:
    one, other = (Generator(DESCRIPTION, Known(MODEL)) for _ in range(2))
    for seed in range(50):
        assert one.request(seed) == other.request(seed)


def test_every_route_with_a_body_has_an_example_to_start_from() -> None:
    generator = Generator(DESCRIPTION, Known(MODEL))
    with_body = {route.path for route in generator.routes if route.fields}
    assert with_body <= least_bodies(MODEL).keys()


async def test_a_refused_field_is_dropped_from_the_next_hostile_request() -> None:
    generator = Generator(DESCRIPTION, Known(MODEL))
    seed = next(seed for seed in range(10_000) if _has_fields(generator, seed))
    hostile = generator.request(seed)
    assert hostile.body is not None
    smaller = hostile.without([*hostile.body], generator.least(hostile))
    transport = httpx.ASGITransport(app=APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        headers = {"content-type": "application/json"}
        answer = await client.post(smaller.target, content=smaller.content, headers=headers)
    assert answer.status_code == 200, answer.text


def _has_fields(generator: Generator, seed: int) -> bool:
    route, fields = generator.outline(seed)
    return route.path == "/v1/completions" and len(fields) > 5 and _is_plain(generator, seed)


def _is_plain(generator: Generator, seed: int) -> bool:
    return generator.request(seed).manner == "plain"


@pytest.mark.parametrize(
    ("answer", "is_fault"),
    [
        (Answer(200), False),
        (Answer(400, body=b"x" * 8_193), True),
        (Answer(500), True),
        (Answer(501), False),
        (Answer(503), True),
        (Answer(503, retry_after="3"), False),
        (Answer(507), False),
        (Answer(200, body=b'data: {"error": "The server failed to answer this request."}'), True),
        (Answer(0), False),
    ],
)
def test_only_server_errors_and_oversized_answers_count_as_faults(
    answer: Answer, is_fault: bool
) -> None:
    assert (fault_of(answer) is not None) is is_fault
