"""The live server under real conditions: shared prefixes, disconnects, a killed engine, a drain."""

import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.servers.served import serve

NUM_TOKENS = 400  # so that no stream has ended when its engine is killed
WORDS = ["time", "year", "people", "way", "day", "man", "thing", "life", "world", "school"]


def prompt_of(num_words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def complete(server, prompt: str, **extra) -> dict:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **extra}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_shared_prefix_is_computed_once_for_32_requests(server):
    prefix = prompt_of(1024, seed=10_001)
    hits_before = server.metric("vllm:prefix_cache_hits_total")
    with ThreadPoolExecutor(32) as pool:
        tails = [f"{prefix} {prompt_of(8, seed=20_000 + n)}" for n in range(32)]
        replies = list(pool.map(lambda text: complete(server, text), tails))
    cached = sorted(r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies)
    assert cached[0] == 0 and all(count >= 1008 for count in cached[1:])
    expected = hits_before + sum(cached)
    server.wait_until(lambda: server.metric("vllm:prefix_cache_hits_total") == expected)


def disconnect(server, number: int) -> None:
    """Send a request over a bare socket and leave at a random moment, politely or not."""
    rng = random.Random(number)
    body = json.dumps(
        {
            "model": server.model,
            "prompt": prompt_of(rng.choice([5, 80, 400]), seed=number),
            "max_tokens": 200,
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
            "n": rng.choice([1, 1, 2]),
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        time.sleep(rng.choice([0.0, 0.01, 0.1, 0.4]) * rng.random())
        if rng.random() < 0.5:  # reset instead of an orderly close
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_200_disconnects_leave_no_block_in_use(server):
    survivor = complete(server, "The sky is", max_tokens=24)["choices"][0]["text"]
    with ThreadPoolExecutor(16) as pool:
        during = pool.submit(complete, server, "The sky is", max_tokens=24)
        list(pool.map(lambda n: disconnect(server, n), range(200)))
        assert during.result()["choices"][0]["text"] == survivor
    server.wait_until(lambda: server.metric("engine_sequences_running") == 0)
    server.wait_until(lambda: server.blocks_in_use() == 0)
    assert complete(server, "The sky is", max_tokens=24)["choices"][0]["text"] == survivor


def stream_events(
    url: str, model: str, number: int, max_tokens: int, outcomes: list, texts: dict | None = None
) -> None:
    """Read a stream to its end and note how it ended."""
    body = {
        "model": model,
        "prompt": prompt_of(20, seed=number),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    outcomes.append(lines[-1].removeprefix("data: "))
    if texts is not None:
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        texts[number] = "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_streams_continue_after_their_engine_was_killed(default_model):
    with serve("smollm2-135m-instruct") as server:
        outcomes: list[str] = []
        texts: dict[int, str] = {}
        model = server.model
        threads = [
            threading.Thread(
                target=stream_events, args=(server.url, model, n, NUM_TOKENS, outcomes, texts)
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.metric("engine_sequences_running") == 4)
        server.wait_until(lambda: server.metric("vllm:generation_tokens_total") >= 40)
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        late = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert late.status_code == 200, "a new request waits until the engine is back"
        for thread in threads:
            thread.join(60)
        assert outcomes == ["[DONE]"] * 4
        asked = {"ignore_eos": True, "temperature": 1, "max_tokens": NUM_TOKENS}

        def undisturbed(number: int) -> str:
            answer = complete(server, prompt_of(20, seed=number), seed=number, **asked)
            return str(answer["choices"][0]["text"])

        with ThreadPoolExecutor(4) as pool:
            assert texts == dict(enumerate(pool.map(undisturbed, range(4))))
        assert server.metric("engine_restarts_total") == 1
        assert server.metric("engine_revived_requests_total") == 4


def test_sigterm_lets_streams_finish_and_exits_zero(default_model):
    with serve("smollm2-135m-instruct") as server:
        outcomes: list[str] = []
        args = (server.url, server.model, 1, 80, outcomes)
        thread = threading.Thread(target=stream_events, args=args)
        thread.start()
        server.wait_until(lambda: server.metric("engine_sequences_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": "x", "prompt": "x"})
        assert refused.status_code == 503
        thread.join(60)
        assert outcomes == ["[DONE]"]
        assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "engine pull"),
        (["--backend", "nothing"], "torch"),
        (["--host", "0.0.0.0"], "API key"),
        (["--dtype", "int3"], "dtype"),
    ],
)
def test_invalid_serve_arguments_fail_with_one_error_line(arguments, message):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "serve", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0], done.stderr
    assert "Traceback" not in done.stderr
