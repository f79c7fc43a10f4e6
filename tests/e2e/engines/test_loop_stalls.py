"""Nothing blocks the server's event loop, so probes are answered whatever else is going on.

What is measured is the processor time of single callbacks on the loop's thread: a busy machine does
not change it.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from engine.backends.custom.frameworks import NativeBackend
from tests.support.servers.live_server import LiveServer, live_server, wait_until

MODEL = "smollm2-135m-instruct"
LONGEST_S = 0.05  # measured: 0.018
MEGABYTE = "All work and no play makes a dull model. " * 25_600


@pytest.fixture(scope="module")
def server(default_model) -> Iterator[LiveServer]:
    with live_server(NativeBackend(MODEL)) as server:
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 200, 60)
        yield server


@pytest.fixture
def callbacks(server: LiveServer, monkeypatch) -> Iterator[list[tuple[float, str]]]:
    """Processor seconds of the callbacks on the server's loop, and which they were."""
    noted: list[tuple[float, str]] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        seconds = time.thread_time() - began
        if threading.current_thread() is server.thread:
            noted.append((seconds, repr(handle)))

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    gc.collect()
    gc.freeze()  # as a server does: the heap of these tests is not its garbage
    yield noted
    gc.unfreeze()


async def load(url: str) -> list[int]:
    """Long prompts, refused or not, beside streams and probes."""

    async def post(**fields) -> int:
        body = {"model": MODEL, "max_tokens": 24, "ignore_eos": True} | fields
        return (await client.post("/v1/completions", json=body)).status_code

    async def probe() -> int:
        statuses = [(await client.get(path)).status_code for path in ("/livez", "/health")]
        return max(statuses)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        streams = [post(prompt=f"{n} times", stream=True) for n in range(32)]
        long = [post(prompt=MEGABYTE) for _ in range(4)]
        chat = {"messages": [{"role": "user", "content": MEGABYTE}]}
        chats = [client.post("/v1/chat/completions", json={"model": MODEL, **chat})]
        probes = [probe() for _ in range(20)]
        return [
            each if isinstance(each, int) else each.status_code
            for each in await asyncio.gather(*streams, *long, *chats, *probes)
        ]


@pytest.mark.slow
def test_a_megabyte_prompt_does_not_block_the_event_loop(server: LiveServer, callbacks):
    statuses = asyncio.run(load(server.url))
    assert statuses[:32] == [200] * 32 and set(statuses[32:37]) == {400}
    assert set(statuses[37:]) == {200}
    slowest = sorted(callbacks, reverse=True)[:5]
    assert len(callbacks) > 100 and slowest[0][0] < LONGEST_S, slowest


def test_openapi_and_capabilities_do_not_block_the_event_loop(server: LiveServer, callbacks):
    """The first one is built when it is asked for, which takes longer than a callback may."""
    for path in ("/openapi.json", "/v1/capabilities", "/openapi.json"):
        assert httpx.get(server.url + path, timeout=60).status_code == 200
    slowest = sorted(callbacks, reverse=True)[:5]
    assert slowest[0][0] < LONGEST_S, slowest
