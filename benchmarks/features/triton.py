"""Measures the time to first token that the Open Inference Protocol and a real Triton server add.

`python -m benchmarks.features.triton` serves a model that computes nothing, puts Triton 2.51 in
front of it (the package nvidia-pytriton, in `.clients/triton`), and asks in turn:
`/v1/completions`, then Triton's own client by HTTP and by gRPC on our server, and by gRPC on
Triton. Each round asks all of them, each time beginning with another one, with prompts of the same
length. Prints one JSON line with medians of the differences, and exits with 1 if a bar is missed.
"""

import argparse
import http.client
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from benchmarks.paired import added_median
from tests.clients.environments import TRITON
from tests.conftest import DEFAULT_MODEL
from tests.support.servers.live_server import free_port
from tests.support.servers.served import serve
from tests.support.servers.tritonserver import tritonserver

NUM_TOKENS = 4
NUM_WARM_ROUNDS = 5
MAX_ADDED_MS = 2.0
NULL_ENGINE = "benchmarks.cluster.processes"


class Asks(Protocol):
    def ttft_s(self, prompt: str) -> float: ...


def tensors(client: Any, prompt: str, *, stream: bool) -> list[Any]:
    values = (
        ("text_input", "BYTES", prompt.encode(), np.object_),
        ("stream", "BOOL", stream, np.bool_),
        ("max_tokens", "INT32", NUM_TOKENS if stream else 1, np.int32),
    )
    made = []
    for name, datatype, value, kind in values:
        made.append(client.InferInput(name, [1], datatype))
        made[-1].set_data_from_numpy(np.array([value], dtype=kind))
    return made


class OpenAI:
    """`/v1/completions`, streamed, or whole with one token. The client of the standard library adds
    least.
    """

    def __init__(self, address: str, *, stream: bool) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._stream = stream

    def ttft_s(self, prompt: str) -> float:
        num_tokens = NUM_TOKENS if self._stream else 1
        body = {"prompt": prompt, "max_tokens": num_tokens, "stream": self._stream}
        begun = time.perf_counter()
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        answer = self._connection.getresponse()
        assert answer.status == 200
        answer.readline()
        spent = time.perf_counter() - begun
        answer.read()
        return spent


class TritonHttp:
    """Triton's client by HTTP. It has no streams, so the answer is one token."""

    def __init__(self, address: str) -> None:
        self._client = triton_http.InferenceServerClient(address, network_timeout=60)

    def ttft_s(self, prompt: str) -> float:
        inputs = tensors(triton_http, prompt, stream=False)
        begun = time.perf_counter()
        self._client.infer(DEFAULT_MODEL, inputs)
        return time.perf_counter() - begun


class TritonGrpc:
    """Triton's client by gRPC, on one open stream."""

    def __init__(self, address: str) -> None:
        self._found: queue.Queue[Any] = queue.Queue()
        self._client = triton_grpc.InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self._found.put((result, error)))

    def ttft_s(self, prompt: str) -> float:
        inputs = tensors(triton_grpc, prompt, stream=True)
        begun, first = time.perf_counter(), 0.0
        self._client.async_stream_infer(DEFAULT_MODEL, inputs, enable_empty_final_response=True)
        while True:
            result, error = self._found.get(timeout=60)
            first = first or time.perf_counter()
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return first - begun


def measure(paths: dict[str, tuple[str, Asks]], num_rounds: int) -> dict[str, Any]:
    """`paths` has the path with which each is compared."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    names, prompts = list(paths), same_length_prompts()
    for number in range(-NUM_WARM_ROUNDS, num_rounds):  # the first rounds open connections
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            spent = paths[name][1].ttft_s(next(prompts))
            if number >= 0:
                times[name].append(spent)
    found: dict[str, Any] = {"rounds": num_rounds, "ok": True}
    for name, (base, _) in paths.items():
        added = added_median(times[base], times[name])
        found[name] = {"median_ms": round(statistics.median(times[name]) * 1e3, 2)} | added
        found["ok"] = found["ok"] and added["added_ms"] <= MAX_ADDED_MS
    return found


def same_length_prompts() -> Iterator[str]:
    """Prompts with the same number of tokens: the default model's vocabulary has a token for each
    digit. They differ from the first token on, so no prompt is cached.
    """
    for number in range(100_000, 1_000_000):
        yield f"{str(number)[::-1]} is a number, and the next one is"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    TRITON.build()
    port = free_port()
    with ExitStack() as stack:
        variables = {"LLM_ENGINE_SERVER__GRPC_PORT": str(port), "NULL_STEP_MS": "0"}
        server = stack.enter_context(serve(DEFAULT_MODEL, env=variables, module=NULL_ENGINE))
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-m", "engine.cli.main", "triton", "export", str(repository)]
        subprocess.run([*command, "--url", server.url], check=True, capture_output=True)
        front = stack.enter_context(tritonserver(TRITON.folder, repository))
        address = server.url.removeprefix("http://")
        paths: dict[str, tuple[str, Asks]] = {
            "completions": ("completions", OpenAI(address, stream=True)),
            "our_grpc": ("completions", TritonGrpc(f"127.0.0.1:{port}")),
            "triton_grpc": ("completions", TritonGrpc(front.grpc)),
            "one_token": ("one_token", OpenAI(address, stream=False)),
            "our_http": ("one_token", TritonHttp(address)),
        }
        figure = measure(paths, rounds)
    print(json.dumps({"triton": figure, "bar_added_ms": MAX_ADDED_MS}))
    return 0 if figure["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
