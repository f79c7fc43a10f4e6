"""Measures the time to first token that gRPC and a real Triton server add.

`python -m benchmarks.triton` serves the default model, puts Triton 2.51 in front of it (the package
nvidia-pytriton, in `.clients/triton`), and asks in turn: `/v1/completions` over HTTP, our gRPC
port, and Triton's. Each round asks all three, so the medians of the differences hold on a busy
machine.
"""

import argparse
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as triton_grpc

from tests.clients.environments import TRITON
from tests.conftest import DEFAULT_MODEL
from tests.live_server import free_port
from tests.served import serve
from tests.tritonserver import tritonserver

NUM_TOKENS = 4


def tensor(name: str, datatype: str, value: Any, kind: Any) -> Any:
    made = triton_grpc.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=kind))
    return made


class GrpcPath:
    """Asks by gRPC on one open stream."""

    def __init__(self, address: str) -> None:
        self._found: queue.Queue[Any] = queue.Queue()
        self._client = triton_grpc.InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self._found.put((result, error)))

    def ttft_s(self, prompt: str) -> float:
        inputs = [
            tensor("text_input", "BYTES", prompt.encode(), np.object_),
            tensor("stream", "BOOL", True, np.bool_),
            tensor("max_tokens", "INT32", NUM_TOKENS, np.int32),
        ]
        begun, first = time.perf_counter(), 0.0
        self._client.async_stream_infer(DEFAULT_MODEL, inputs, enable_empty_final_response=True)
        while True:
            result, error = self._found.get(timeout=60)
            first = first or time.perf_counter()
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return first - begun


class HttpPath:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def ttft_s(self, prompt: str) -> float:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True}
        begun, first = time.perf_counter(), 0.0
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line and not first:
                    first = time.perf_counter()
        return first - begun


def measure(paths: dict[str, Any], num_rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(num_rounds + 3):
        for name, path in paths.items():
            spent = path.ttft_s(f"{number} {name} is a number, and the next one is")
            if number >= 3:  # the first rounds open connections
                times[name].append(spent)
    base = times["http"]
    for name, spent in times.items():
        added = statistics.median(b - a for a, b in zip(base, spent, strict=True))
        # The best is what a busy machine disturbs least.
        best = min(spent) - min(base)
        median = statistics.median(spent)
        print(
            f"{name}: median TTFT {median * 1e3:.2f} ms, added {added * 1e3:+.2f} ms;"
            f" best {min(spent) * 1e3:.2f} ms, added {best * 1e3:+.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    TRITON.build()
    port = free_port()
    with ExitStack() as stack:
        variables = {"LLM_ENGINE_SERVER__GRPC_PORT": str(port)}
        server = stack.enter_context(serve(DEFAULT_MODEL, env=variables))
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-m", "engine.cli.main", "triton", "export", str(repository)]
        subprocess.run([*command, "--url", server.url], check=True, capture_output=True)
        front = stack.enter_context(tritonserver(TRITON.folder, repository))
        paths = {"http": HttpPath(server.url), "grpc": GrpcPath(f"127.0.0.1:{port}")}
        measure(paths | {"triton": GrpcPath(front.grpc)}, rounds)


if __name__ == "__main__":
    main()
