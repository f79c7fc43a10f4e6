"""The Open Inference Protocol, driven by Triton's own client over HTTP and gRPC, unchanged."""

import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from engine.core.config import ConfigError
from engine.core.config_schema import ServerSettings
from engine.core.errors import InferenceError
from engine.core.interfaces.backend import TextEvent
from engine.servers.kserve.grpc_messages import CLASSES
from engine.servers.kserve.grpc_server import GrpcServer
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import (
    LiveServer,
    events_of,
    free_port,
    live_server,
    make_settings,
    wait_until,
)

WORDS = "Hello from a fake model."
KEY = "client-key-0123456789abcdef"
URL = f"/v2/models/{MODEL}"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(server={"grpc_port": 0, "api_key": KEY}) as server:
        yield server


@pytest.fixture
def backend(server: LiveServer) -> FakeBackend:
    server.backend.reset()
    return server.backend


def grpc_port(server: LiveServer) -> int:
    (made,) = [each for each in server.services.components if isinstance(each, GrpcServer)]
    return made.port


@pytest.fixture(params=["http", "grpc"])
def kind(request: pytest.FixtureRequest) -> Any:
    return {"http": triton_http, "grpc": triton_grpc}[request.param]


@pytest.fixture
def client(kind: Any, server: LiveServer, backend: FakeBackend) -> Iterator[Any]:
    port = server.port if kind is triton_http else grpc_port(server)
    with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield client


@pytest.fixture
def rest(server: LiveServer, backend: FakeBackend) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
        yield client


def bearer() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}  # Triton's client adds to it


def tensor(kind: Any, name: str, datatype: str, values: Any) -> Any:
    made = kind.InferInput(name, list(np.shape(values)), datatype)
    types = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
    made.set_data_from_numpy(np.array(values, dtype=types[datatype]))
    return made


def prompt(kind: Any, *texts: str) -> Any:
    return tensor(kind, "text_input", "BYTES", [each.encode() for each in texts])


def texts_of(result: Any, name: str = "text_output") -> list[str]:
    return [each.decode() for each in result.as_numpy(name).flatten()]


def test_kserve_health_and_metadata(client: Any, kind: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(MODEL, headers=bearer())
    assert client.is_model_ready(MODEL, "1", headers=bearer())
    assert not client.is_model_ready("absent", headers=bearer())
    as_json = {} if kind is triton_http else {"as_json": True}
    about = client.get_server_metadata(headers=bearer(), **as_json)
    assert about["name"] == "engine" and "generate" in about["extensions"]
    model = client.get_model_metadata(MODEL, headers=bearer(), **as_json)
    assert model["name"] == MODEL and model["versions"] == ["1"]
    assert {each["name"]: each["datatype"] for each in model["inputs"]}["text_input"] == "BYTES"
    index = client.get_model_repository_index(headers=bearer(), **as_json)
    rows = index if kind is triton_http else index["models"]
    assert [(each["name"], each["state"]) for each in rows] == [(MODEL, "READY")]


def test_kserve_infer_completes_texts(client: Any, kind: Any, backend: FakeBackend) -> None:
    inputs = [
        prompt(kind, "one two", "three"),
        tensor(kind, "max_tokens", "INT32", [3]),
        tensor(kind, "temperature", "FP32", [0.0, 0.0]),
        tensor(kind, "stop_words", "BYTES", [b"END", b"FIN"]),
    ]
    result = client.infer(MODEL, inputs, request_id="mine", headers=bearer())
    assert texts_of(result) == ["Hello from a"] * 2
    assert texts_of(result, "finish_reason") == ["length"] * 2
    assert result.as_numpy("num_output_tokens").tolist() == [3, 3]
    assert result.as_numpy("num_input_tokens").tolist() == [2, 1]
    head = result.get_response()
    assert (head["id"] if kind is triton_http else head.id) == "mine"
    assert [each.prompt for each in backend.requests] == ["one two", "three"]
    params = backend.requests[0].context.params
    assert (params.max_tokens, params.temperature, params.stop) == (3, 0.0, ("END", "FIN"))


def test_outputs_have_the_shape_of_the_input_texts(client: Any, kind: Any) -> None:
    asked = [tensor(kind, "text_input", "BYTES", [[b"a"], [b"b"]])]
    outputs = [kind.InferRequestedOutput("text_output")]
    result = client.infer(MODEL, asked, outputs=outputs, headers=bearer())
    assert result.as_numpy("text_output").shape == (2, 1)
    assert result.as_numpy("finish_reason") is None


def test_request_parameters_and_those_of_tritons_vllm_backend_are_read(
    client: Any, kind: Any, backend: FakeBackend
) -> None:
    sampling = json.dumps({"temperature": "0.5", "top_k": 7, "stop": "9"}).encode()
    asked = [
        prompt(kind, "Hi"),
        tensor(kind, "sampling_parameters", "BYTES", [sampling]),
        tensor(kind, "exclude_input_in_output", "BOOL", [False]),
        tensor(kind, "stream", "BOOL", [False]),
    ]
    result = client.infer(MODEL, asked, parameters={"max_tokens": 2, "seed": 5}, headers=bearer())
    assert texts_of(result) == ["HiHello from"]
    params = backend.requests[0].context.params
    assert (params.temperature, params.top_k, params.stop) == (0.5, 7, ("9",))
    assert (params.max_tokens, params.seed) == (2, 5)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("temperature", "FP32", [9.0]), "temperature"),
        (("wibble", "INT32", [1]), "wibble"),
        (("max_tokens", "INT32", [1, 2]), "one value"),
        (("stream", "BOOL", [True]), "generate_stream"),
        (("sampling_parameters", "BYTES", [b"{"]), "sampling_parameters"),
        (("sampling_parameters", "BYTES", [b"[]"]), "should be an object"),
        (("text_input", "BYTES", [b"\xff"]), "UTF-8"),
    ],
)
def test_invalid_kserve_inputs_are_named(
    client: Any, kind: Any, extra: tuple[str, str, Any], message: str
) -> None:
    inputs = [tensor(kind, *extra)]
    if extra[0] != "text_input":
        inputs.append(prompt(kind, "a"))
    with pytest.raises(InferenceServerException, match=message):
        client.infer(MODEL, inputs, headers=bearer())


def test_infer_needs_a_prompt_model_version_and_key(client: Any, kind: Any) -> None:
    for model, version, inputs, headers, message in (
        (MODEL, "", [tensor(kind, "max_tokens", "INT32", [1])], bearer(), "text_input"),
        ("absent", "", [prompt(kind, "a")], bearer(), "no such model"),
        (MODEL, "2", [prompt(kind, "a")], bearer(), "version 1 only"),
        (MODEL, "", [prompt(kind, "a")], {"authorization": "Bearer wrong"}, "API key"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            client.infer(model, inputs, model_version=version, headers=headers)
    outputs = [kind.InferRequestedOutput("logits")]
    with pytest.raises(InferenceServerException, match="there are text_output"):
        client.infer(MODEL, [prompt(kind, "a")], outputs=outputs, headers=bearer())


def streamed(server: LiveServer, *requests: dict[str, Any]) -> list[Any]:
    """The responses of a gRPC stream, until each request has its last one."""
    found: queue.Queue[Any] = queue.Queue()
    responses: list[Any] = []
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{grpc_port(server)}") as client:
        client.start_stream(lambda result, error: found.put((result, error)), headers=bearer())
        for each in requests:
            client.async_stream_infer(MODEL, enable_empty_final_response=True, **each)
        num_open = len(requests)
        while num_open:
            result, error = found.get(timeout=30)
            responses.append((result, error))
            is_last = error is not None
            if error is None:
                is_last = result.get_response().parameters["triton_final_response"].bool_param
            num_open -= is_last
        client.stop_stream()
    return responses


def test_a_grpc_stream_has_one_response_per_token(server: LiveServer, backend: FakeBackend) -> None:
    asked = [prompt(triton_grpc, "a b"), tensor(triton_grpc, "stream", "BOOL", [True])]
    responses = [result for result, _ in streamed(server, {"inputs": asked, "request_id": "7"})]
    *pieces, end = responses
    assert len(pieces) > 3 and "".join(text for each in pieces for text in texts_of(each)) == WORDS
    assert end.as_numpy("text_output") is None
    assert {each.get_response().id for each in responses} == {"7"}
    assert texts_of(pieces[-1], "finish_reason") == ["stop"]


def test_a_grpc_stream_carries_several_requests(server: LiveServer, backend: FakeBackend) -> None:
    stream = tensor(triton_grpc, "stream", "BOOL", [True])
    wrong = tensor(triton_grpc, "temperature", "FP32", [9.0])
    responses = streamed(
        server,
        {"inputs": [prompt(triton_grpc, "a"), stream], "request_id": "1"},
        {"inputs": [prompt(triton_grpc, "b")], "request_id": "2"},
        {"inputs": [prompt(triton_grpc, "c"), stream, wrong], "request_id": "3"},
    )
    texts = {"1": "", "2": ""}
    for result, error in responses:
        if error is None and result.as_numpy("text_output") is not None:
            texts[result.get_response().id] += texts_of(result)[0]
    assert texts == {"1": WORDS, "2": WORDS}
    assert ["temperature" in str(error) for _, error in responses if error is not None] == [True]


def test_an_abandoned_grpc_stream_is_aborted(server: LiveServer, backend: FakeBackend) -> None:
    backend.token_s = 0.05
    backend.script = [TextEvent(0, "a", 1) for _ in range(1000)]
    first: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{grpc_port(server)}") as client:
        client.start_stream(lambda result, error: first.put(error), headers=bearer())
        stream = tensor(triton_grpc, "stream", "BOOL", [True])
        client.async_stream_infer(MODEL, [prompt(triton_grpc, "a"), stream])
        assert first.get(timeout=30) is None
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: server.services.lifecycle.num_admitted == 0, 10)


def test_kserve_generate_completes_a_text(rest: httpx.Client, backend: FakeBackend) -> None:
    body = {"text_input": "a b", "parameters": {"max_tokens": 2, "return_finish_reason": True}}
    made = rest.post(f"{URL}/generate", json=body | {"id": "x"}).json()
    assert made == {
        "id": "x",
        "model_name": MODEL,
        "model_version": "1",
        "text_output": "Hello from",
        "finish_reason": "length",
    }
    several = rest.post(f"{URL}/versions/1/generate", json={"text_input": ["a", "b"]}).json()
    assert several["text_output"] == [WORDS, WORDS]
    refused = rest.post(f"{URL}/generate", json={"text_input": "a", "n": 2})
    assert refused.status_code == 400 and "n should be 1" in refused.json()["error"].replace(
        ":", ""
    )
    wrong = rest.post(
        f"{URL}/generate", json={"text_input": "a", "seed": 1, "parameters": {"seed": 2}}
    )
    assert wrong.status_code == 400 and "twice" in wrong.json()["error"]


def test_kserve_generate_stream_streams_a_text(rest: httpx.Client, backend: FakeBackend) -> None:
    asked = {"text_input": "a", "return_num_output_tokens": True, "return_finish_reason": True}
    events = events_of(rest.post(f"{URL}/generate_stream", json=asked).text)
    assert "".join(each["text_output"] for each in events) == WORDS
    assert sum(each["num_output_tokens"] for each in events) == 6
    assert [each["finish_reason"] for each in events][-1] == "stop"
    refused = rest.post(f"{URL}/generate_stream", json={"text_input": ["a", "b"]})
    assert refused.status_code == 400 and "one text" in refused.json()["error"]
    backend.failure, backend.fail_after = InferenceError("The engine failed."), 2
    events = events_of(rest.post(f"{URL}/generate_stream", json={"text_input": "a"}).text)
    assert "error" in events[-1]


@pytest.mark.parametrize(
    ("head", "tail", "message"),
    [
        ({"binary_data_size": 99}, b"", "binary_data_size"),
        ({"binary_data_size": 5}, b"\x01\0\0\0a!", "belong to no tensor"),
        ({"binary_data_size": 4}, b"\x09\0\0\0", "ends in an element"),
        ({"binary_data_size": 2}, b"\x09\0", "ends in the length"),
        ({"binary_data_size": 10}, b"\x01\0\0\0a\x01\0\0\0b", "as its shape says"),
    ],
)
def test_malformed_binary_tensors_are_refused(
    rest: httpx.Client, head: dict[str, Any], tail: bytes, message: str
) -> None:
    body = {
        "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": head}]
    }
    encoded = json.dumps(body).encode()
    headers = {"inference-header-content-length": str(len(encoded))}
    response = rest.post(f"{URL}/infer", content=encoded + tail, headers=headers)
    assert response.status_code == 400 and message in response.json()["error"]


def test_the_model_in_an_infer_body_is_that_of_the_path(rest: httpx.Client) -> None:
    inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}]
    for name, status in ((MODEL, 200), ("other", 400)):
        body = {"model_name": name, "inputs": inputs}
        response = rest.post(f"/v2/models/{MODEL}/infer", json=body)
        assert response.status_code == status, response.text


def test_json_tensors_of_any_shape_are_read(rest: httpx.Client) -> None:
    def infer(shape: Any, data: Any, datatype: str = "BYTES") -> httpx.Response:
        entry = {"name": "text_input", "shape": shape, "datatype": datatype, "data": data}
        return rest.post(f"{URL}/infer", json={"inputs": [entry]})

    made = infer([2, 1], [["a"], ["b"]]).json()
    assert made["outputs"][0]["data"] == [WORDS, WORDS] and made["outputs"][0]["shape"] == [2, 1]
    for wrong in (infer([2], ["a"]), infer([1], [1]), infer([1], ["a"], "TEXT"), infer([0], [])):
        assert wrong.status_code == 400 and isinstance(wrong.json()["error"], str)


def test_grpc_messages_equal_those_of_tritons_client() -> None:
    """Each of our messages is one of theirs: the same fields with the same numbers and types."""
    for name, ours in CLASSES.items():
        outer, _, inner = name.partition(".")
        theirs = service_pb2.DESCRIPTOR.message_types_by_name[outer]
        theirs = theirs.nested_types_by_name[inner] if inner else theirs

        def facts(descriptor: Any) -> list[tuple[Any, ...]]:
            return [
                (
                    *(field.name, field.number, field.type, field.is_repeated),
                    field.message_type and field.message_type.full_name,
                    field.containing_oneof and field.containing_oneof.name,
                )
                for field in descriptor.fields
            ]

        assert facts(ours.DESCRIPTOR) == facts(theirs), name


def made_grpc(settings: ServerSettings) -> GrpcServer:
    return GrpcServer(lambda *_: None, settings, lambda request: None)


def test_grpc_needs_its_dialect_and_a_free_port() -> None:
    with pytest.raises(ConfigError, match="kserve"):
        made_grpc(make_settings(server={"grpc_port": 0, "dialects": []}).server)


async def test_a_used_grpc_port_is_reported() -> None:
    port = free_port()
    settings = make_settings(server={"grpc_port": port}).server
    first, second = made_grpc(settings), made_grpc(settings)
    await first.start()
    with pytest.raises(ConfigError, match="server.grpc_port"):
        await second.start()
    await first.stop()
