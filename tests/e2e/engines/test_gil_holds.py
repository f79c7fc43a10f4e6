"""Nothing holds the GIL for long, whatever clients send. Otherwise heartbeats, probes and other
requests would wait. A forward pass runs without it.

Frontend and engine run in this process, so one thread that ticks sees both. Time in which a thread
that can hold the GIL waited for a processor does not count. So a busy machine can hide a hold, but
not make one up.
"""

import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from engine.backends.custom.frameworks import NativeBackend
from engine.servers.schema.tools import MAX_TOOLS
from tests.support.servers.live_server import LiveServer, live_server, wait_until

MODEL = "smollm2-135m-instruct"
LONGEST_S = 0.2
TICK_S = 0.002
NUM_ADDED = 30_000_000
JSON = {"content-type": "application/json"}
TEXT = "All work and no play makes a dull model. "


class Ticker(threading.Thread):
    """Notes the longest time in which this thread was due, but did not get the GIL."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.num_ticks = 0
        self.is_over = False
        self._files: dict[int, int] = {}  # of each thread's statistics

    def run(self) -> None:
        while not self.is_over:
            waited, due = self._waited(), time.monotonic() + TICK_S
            time.sleep(TICK_S)
            late = time.monotonic() - due
            if late > self.longest_s:
                starved = max(now - waited.get(each, 0) for each, now in self._waited().items())
                self.longest_s = max(self.longest_s, late - starved * 1e-9)
            self.num_ticks += 1
        for file in self._files.values():
            os.close(file)

    def _waited(self) -> dict[int, int]:
        """Nanoseconds for which each thread that can hold the GIL has waited for a processor."""
        found = {}
        for number in [each.native_id for each in threading.enumerate()]:
            try:
                if number is not None and number not in self._files:
                    path = f"/proc/self/task/{number}/schedstat"
                    self._files[number] = os.open(path, os.O_RDONLY)
                if number is not None:
                    found[number] = int(os.pread(self._files[number], 64, 0).split()[1])
            except OSError:  # the thread has ended
                continue
        return found


@contextmanager
def ticking() -> Iterator[Ticker]:
    gc.collect()
    gc.freeze()  # as a server does: the heap of these tests is not its garbage
    ticker = Ticker()
    ticker.start()
    wait_until(lambda: ticker.num_ticks > 0)
    try:
        yield ticker
    finally:
        ticker.is_over = True
        ticker.join()
        gc.unfreeze()


def schema() -> dict[str, Any]:
    fields = {
        f"field{number}": {"type": "array", "items": {"enum": [f"{number}-{i}" for i in range(60)]}}
        for number in range(30)
    }
    return {"type": "object", "properties": fields}


def tools() -> list[dict[str, Any]]:
    """As many as a request may have, four megabytes in sum."""
    described = {"description": "x y " * 2000, "parameters": {"type": "object", "properties": {}}}
    return [
        {"type": "function", "function": {"name": f"f{number}"} | described}
        for number in range(MAX_TOOLS)
    ]


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2} | fields


def interp(**spec: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/interp/run", {"model": MODEL, "prompt": TEXT * 20, "interp": spec}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "hello"}]
    return "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 2} | fields


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}}
REQUESTS = {
    "a grammar": completion(response_format=FORMAT),
    "a large result": interp(
        capture=[{"site": f"blocks.{layer}.hook_resid_post"} for layer in range(30)]
    ),
    "a lens": interp(lens={"layers": "all", "top": 20}),
    "many biases": completion(logit_bias={str(each): 1 for each in range(1024)}),
    "a long prompt": completion(prompt=TEXT * 40),
    "many choices": completion(n=16, logprobs=20),
    "logprobs of a prompt": completion(prompt=TEXT * 15, echo=True, logprobs=20),
    "large tools": chat(tools=tools()),
    "a part of a control token": chat(messages=[{"role": "user", "content": "<|" + TEXT * 60_000}]),
    "many keys": completion(metadata={str(each): "" for each in range(300_000)}),
}


REFUSED = {
    "large tools": b"context length",
    "a part of a control token": b"context length",
    "many keys": b"at most 16 keys",
}


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def server(default_model: Any) -> Iterator[LiveServer]:
    with live_server(NativeBackend(MODEL, in_process=True)) as server:
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 200, 60)
        yield server


def hold_the_gil() -> None:
    """One call that computes and lets no other thread run."""
    sum(range(NUM_ADDED))


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_ticker_sees_who_holds_the_gil_and_no_other(server: LiveServer, is_busy: bool) -> None:
    """Also while the engine computes, with threads that wait for a processor."""
    asked: dict[str, Any] = {"content": encoded(completion(prompt=TEXT * 40)[1]), "headers": JSON}
    with ThreadPoolExecutor(1) as threads:
        for hold, is_held in ((lambda: time.sleep(2 * LONGEST_S), False), (hold_the_gil, True)):
            with ticking() as ticker:
                if is_busy:
                    asking = threads.submit(httpx.post, f"{server.url}/v1/completions", **asked)
                    wait_until(lambda: server.services.lifecycle.num_admitted > 0)
                hold()
                if is_busy:
                    assert asking.result(60).status_code == 200
            assert (ticker.longest_s > LONGEST_S) == is_held, ticker.longest_s


@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_holds_the_gil_for_long(server: LiveServer, name: str) -> None:
    path, body = REQUESTS[name]
    asked: dict[str, Any] = {"content": encoded(body), "headers": JSON, "timeout": 100}
    # The client is in this process, too. So it does not parse the answer.
    with ticking() as ticker, httpx.stream("POST", server.url + path, **asked) as answer:
        start = b""
        for part in answer.iter_raw(65536):
            start = start or part[:300]
    assert answer.status_code == (400 if name in REFUSED else 200), start
    assert REFUSED.get(name, b"") in start
    assert ticker.longest_s < LONGEST_S
