"""A server under load sends all of its spans."""

import asyncio
import time

import httpx
import pytest

from tests.support.fakes.fake_backend import FakeBackend
from tests.support.servers.live_server import chat, live_server
from tests.support.servers.otlp_receiver import http_receiver

RATE, SECONDS = 200, 5
SPANS = 6  # of a request: itself and its phases


@pytest.mark.slow  # repeats test_200_requests_at_once_lose_no_span over a socket, for longer
async def test_200_requests_per_second_lose_no_span() -> None:
    backend = FakeBackend()
    with http_receiver() as receiver:
        tracing = {"enabled": True, "endpoint": receiver.url}
        with live_server(backend, tracing=tracing) as server:
            limits = httpx.Limits(max_connections=256)
            async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
                tasks = []
                began = time.monotonic()
                for number in range(RATE * SECONDS):
                    await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
                    asking = client.post("/v1/chat/completions", json=chat())
                    tasks.append(asyncio.create_task(asking))
                answers = await asyncio.gather(*tasks)
        assert all(each.status_code == 200 for each in answers)
        assert len(receiver.spans) == RATE * SECONDS * SPANS
