"""A model repository of `engine triton export`, under the real Triton server, in front of our
server. Triton's client drives both.
"""

import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.clients.environments import NUMPY_2, TRITON
from tests.conftest import DEFAULT_MODEL
from tests.support.servers.live_server import free_port
from tests.support.servers.served import ServedEngine, serve
from tests.support.servers.tritonserver import TritonFailed, TritonServer, tritonserver

pytestmark = pytest.mark.clients

PROMPTS = ("The capital of France is", "Once upon a time", "1, 2, 3, 4,", "Grüße aus Köln: ")


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Iterator[tuple[ServedEngine, str]]:
    """Our server, with the address of its gRPC port."""
    port = free_port()
    with serve(DEFAULT_MODEL, env={"LLM_ENGINE_SERVER__GRPC_PORT": str(port)}) as served:
        yield served, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def repository(engine: tuple[ServedEngine, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    command = [sys.executable, "-m", "engine.cli.main", "triton", "export", str(folder)]
    subprocess.run([*command, "--url", engine[0].url], check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[TritonServer]:
    TRITON.build()
    with tritonserver(TRITON.folder, repository) as server:
        yield server


def tensor(name: str, datatype: str, values: list[Any]) -> Any:
    types = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
    made = triton_grpc.InferInput(name, [len(values)], datatype)
    made.set_data_from_numpy(np.array(values, dtype=types[datatype]))
    return made


def ask(address: str, prompts: list[str], *, stream: bool, num_tokens: int = 24) -> list[Any]:
    """The responses to one request on a gRPC stream."""
    found: queue.Queue[Any] = queue.Queue()
    inputs = [
        tensor("text_input", "BYTES", [each.encode() for each in prompts]),
        tensor("stream", "BOOL", [stream]),
        tensor("max_tokens", "INT32", [num_tokens]),
        tensor("temperature", "FP32", [0.0]),
    ]
    with triton_grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer(DEFAULT_MODEL, inputs, enable_empty_final_response=True)
        responses = []
        while True:
            result, error = found.get(timeout=60)
            if error is not None:
                raise error
            if result.as_numpy("text_output") is not None:
                responses.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return responses


def text_of(responses: list[Any]) -> str:
    return b"".join(each.as_numpy("text_output")[0] for each in responses).decode()


def test_triton_streams_the_same_text_as_our_server(
    engine: tuple[ServedEngine, str], triton: TritonServer
) -> None:
    served, ours = engine
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "model": DEFAULT_MODEL}
        expected = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
        for address in (ours, triton.grpc):
            pieces = ask(address, [prompt], stream=True)
            assert text_of(pieces) == expected["choices"][0]["text"]
            assert len(pieces) > 1
            assert sum(int(each.as_numpy("num_output_tokens")[0]) for each in pieces) == 24


def test_triton_answers_several_prompts_in_one_request(
    engine: tuple[ServedEngine, str], triton: TritonServer
) -> None:
    (ours,) = ask(engine[1], list(PROMPTS), stream=False)
    (theirs,) = ask(triton.grpc, list(PROMPTS), stream=False)
    for name in ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens"):
        assert ours.as_numpy(name).tolist() == theirs.as_numpy(name).tolist(), name


def test_triton_generate_route_passes_integer_and_float_parameters(triton: TritonServer) -> None:
    """Integers and floats of JSON reach our server as they were sent."""
    body = {"text_input": PROMPTS[0], "max_tokens": 7, "top_k": 40, "seed": 2**40, "stream": False}
    made = httpx.post(f"http://{triton.http}/v2/models/{DEFAULT_MODEL}/generate", json=body)
    assert made.status_code == 200, made.text
    assert made.json()["num_output_tokens"] == 7


def test_triton_client_gets_the_error_of_a_refused_request(triton: TritonServer) -> None:
    with pytest.raises(InferenceServerException, match="max_tokens"):
        ask(triton.grpc, ["a"], stream=True, num_tokens=10**6)


def test_numpy_2_is_refused_by_name(repository: Path, triton: TritonServer) -> None:
    NUMPY_2.build()
    with pytest.raises(TritonFailed, match="needs numpy < 2"):  # noqa: SIM117
        with tritonserver(TRITON.folder, repository, NUMPY_2.folder):
            pass
