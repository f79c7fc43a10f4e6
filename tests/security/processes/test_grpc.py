"""What hostile clients send by gRPC: messages before a key, more than a stream may hold, texts of
any length, and plain text where the server speaks TLS (SEC-61; T1, T2).
"""

import contextlib
import itertools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from engine.servers.kserve import grpc_server, grpc_stream
from engine.servers.kserve.grpc_call import MAX_TEXT_BYTES, Call
from engine.servers.kserve.grpc_messages import CLASSES, SERVICE, UNARY
from engine.servers.kserve.grpc_server import GrpcServer
from tests.scoreboard.http.target import held_server
from tests.support.fakes.fake_backend import MODEL
from tests.support.servers.live_server import (
    LiveServer,
    free_port,
    live_server,
    make_settings,
    wait_until,
)

KEY = "client-key-0123456789abcdef"
BEARER = (("authorization", f"Bearer {KEY}"),)
REQUEST = CLASSES["ModelInferRequest"]
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(server={"grpc_port": 0, "api_key": KEY, "body_limit_mb": 2}) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(server: LiveServer) -> None:
    server.backend.reset()


@pytest.fixture
def channel(server: LiveServer) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port_of(server)}", options) as channel:
        yield channel


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each message that the server has read."""
    found: list[int] = []
    read = Call.read

    async def counted(self: Call) -> bytes | None:
        raw = await read(self)
        found.append(len(raw or b""))
        return raw

    monkeypatch.setattr(Call, "read", counted)
    return found


def port_of(server: LiveServer) -> int:
    (made,) = [each for each in server.services.components if isinstance(each, GrpcServer)]
    return made.port


def ask(channel: grpc.Channel, name: str, message: Any, metadata: Any = BEARER) -> Any:
    """Call a method that takes one message. Bytes are sent as they are."""
    encode = None if isinstance(message, bytes) else type(message).SerializeToString
    decode = CLASSES[f"{name}Response"].FromString
    call = channel.unary_unary(f"/{SERVICE}/{name}", encode, decode)
    return call(message, timeout=30, metadata=metadata)


def open_stream(channel: grpc.Channel, messages: Iterator[Any], metadata: Any = BEARER) -> Any:
    call = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        REQUEST.SerializeToString,
        CLASSES["ModelStreamInferResponse"].FromString,
    )
    return call(messages, timeout=60, metadata=metadata)


def infer(text: str = "a", **fields: Any) -> Any:
    data = {"bytes_contents": [text.encode()]}
    entry = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": data}
    return REQUEST(**({"model_name": MODEL, "inputs": [entry]} | fields))


@pytest.mark.parametrize("name", [*UNARY, "ModelStreamInfer"])
@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)], ids=str)
def test_no_grpc_message_is_read_before_authentication(
    channel: grpc.Channel, reads: list[int], name: str, metadata: Any
) -> None:
    sent = itertools.repeat(infer("x" * MIB), 100)
    if name in grpc_server.PUBLIC:
        assert ask(channel, name, CLASSES[f"{name}Request"](), metadata)
        return
    with pytest.raises(grpc.RpcError) as raised:
        if name == "ModelStreamInfer":
            list(open_stream(channel, sent, metadata))
        else:
            ask(channel, name, bytes(MIB), metadata)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert reads == []


def test_grpc_messages_without_a_key_take_little_memory() -> None:
    """The library holds what has arrived of a message, before anybody asks for it."""
    port, large = free_port(), bytes(4 * MIB)
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with (
        held_server(server={"grpc_port": port, "body_limit_mb": 8}) as target,
        contextlib.ExitStack() as stack,
    ):
        process = psutil.Process(target.process.pid)
        before = process.memory_info().rss
        for _ in range(2):
            calls = []
            for _ in range(5):
                address = f"127.0.0.1:{port}"
                channel = stack.enter_context(grpc.insecure_channel(address, options))
                method = channel.unary_unary(f"/{SERVICE}/ModelInfer")
                calls += [method.future(large, timeout=60, wait_for_ready=True) for _ in range(16)]
            assert {call.exception().code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        grown = process.memory_info().rss - before
    assert grown < 16 * MIB, f"{grown // MIB} MiB for {2 * len(calls)} calls"


def test_a_grpc_stream_stops_reading_at_its_message_limit(
    server: LiveServer, channel: grpc.Channel, reads: list[int]
) -> None:
    """While no request ends, neither the number nor the size of messages grows beyond a bound."""
    for text, most in (("a", grpc_stream.MAX_OPEN), ("x" * MIB, 3)):
        server.backend.prefill_s = 1000.0
        reads.clear()
        call = open_stream(channel, itertools.repeat(infer(text), 500))
        wait_until(lambda: len(reads) >= most, 30)  # noqa: B023 - called here
        assert ask(channel, "ServerReady", CLASSES["ServerReadyRequest"]()).ready
        assert len(reads) <= most + 1, "and the message of the other call"
        call.cancel()
        wait_until(lambda: server.services.lifecycle.num_admitted == 0, 30)


def test_a_tenants_number_of_grpc_streams_is_bounded(
    channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_STREAMS", 2)
    ended = threading.Event()

    def one_and_wait() -> Iterator[Any]:
        yield infer()
        ended.wait(30)

    calls = [open_stream(channel, one_and_wait()) for _ in range(2)]
    for call in calls:
        next(call)
    with pytest.raises(grpc.RpcError, match="2 streams are open") as raised:
        list(open_stream(channel, iter(())))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    ended.set()
    for call in calls:
        list(call)
    assert list(open_stream(channel, iter([infer()])))


@pytest.mark.parametrize("method", ["ServerLive", "ServerReady"])
def test_silent_grpc_calls_without_a_key_take_no_admission_slot(method: str) -> None:
    """They are answered before a message has come, so they can't wait for it."""
    limits = {"grpc_port": 0, "api_key": KEY, "max_concurrent_requests": 4}
    ended = threading.Event()

    def never() -> Iterator[Any]:
        ended.wait(30)
        yield from ()

    with (
        live_server(server=limits) as small,
        grpc.insecure_channel(f"127.0.0.1:{port_of(small)}") as channel,
    ):
        call = channel.stream_stream(f"/{SERVICE}/{method}", None, None)
        silent = [call(never()) for _ in range(8)]
        for each in silent:
            assert next(each)
        assert ask(channel, "ServerMetadata", CLASSES["ServerMetadataRequest"]()).name
        ended.set()


def test_the_number_of_silent_grpc_calls_of_a_tenant_is_bounded(
    server: LiveServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (served,) = [each for each in server.services.components if isinstance(each, GrpcServer)]
    monkeypatch.setattr(served, "_max_calls", 3)
    ended = threading.Event()

    def never() -> Iterator[Any]:
        ended.wait(30)
        yield from ()

    call = channel.stream_stream(f"/{SERVICE}/ModelInfer", None, None)
    silent = [call(never(), metadata=BEARER) for _ in range(3)]
    wait_until(lambda: sum(served._num_calls.values()) == 3, 30)
    with pytest.raises(grpc.RpcError, match="3 calls are open"):
        ask(channel, "ModelInfer", infer())
    for each in silent:
        each.cancel()
    ended.set()
    wait_until(lambda: not served._num_calls, 30)
    assert ask(channel, "ModelInfer", infer()).outputs


def test_an_idle_grpc_stream_is_closed(
    channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_stream, "IDLE_S", 0.05)
    ended = threading.Event()

    def silent() -> Iterator[Any]:
        ended.wait(30)
        yield from ()

    with pytest.raises(grpc.RpcError, match="had no request"):
        list(open_stream(channel, silent()))
    ended.set()


LONG = "\x00\x1b[31m\u202e\n" + "i" * 500_000
HOSTILE = {
    "id": {"id": LONG},
    "model": {"model_name": LONG},
    "version": {"model_version": LONG},
    "tensor": {"inputs": [{"name": LONG, "datatype": LONG, "shape": [1]}]},
    "shape": {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1] * 100_000}]},
    "tensors": {"inputs": [{"name": "text_input"}] * 100_000},
    "outputs": {"outputs": [{"name": LONG}] * 2},
    "raw": {"raw_input_contents": [b""] * 100_000},
    "parameters": {"parameters": {str(n): {"bool_param": True} for n in range(20_000)}},
    "parameter": {"parameters": {LONG: {"string_param": LONG}}},
    "elements": {
        "inputs": [
            {"name": "n", "datatype": "BOOL", "shape": [2]}
            | {"contents": {"bool_contents": [True] * 1_500_000}}
        ]
    },
    "path": {"model_name": f"{MODEL}/ready"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_grpc_errors_echo_only_short_printable_text(channel: grpc.Channel, case: str) -> None:
    message = infer(**HOSTILE[case])
    with pytest.raises(grpc.RpcError) as raised:
        ask(channel, "ModelInfer", message)
    told = raised.value.details()
    assert raised.value.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    ), told
    (answer,) = open_stream(channel, iter([message]))
    for text in (told, answer.error_message):
        assert text and text.isprintable() and len(text.encode()) <= MAX_TEXT_BYTES
    assert answer.ByteSize() < 2 * MAX_TEXT_BYTES
    assert ask(channel, "ModelInfer", infer()).outputs, "the server answers the next request"


def test_invalid_grpc_bytes_fail_only_their_call(channel: grpc.Channel) -> None:
    for name in set(UNARY) - grpc_server.PUBLIC:
        for junk in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x07"):
            with pytest.raises(grpc.RpcError) as raised:
                ask(channel, name, junk)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert "Traceback" not in raised.value.details()
    with pytest.raises(grpc.RpcError) as raised:
        ask(channel, "ModelInfer", bytes(3 * MIB))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for name in ("ModelMetadata", "ModelReady"):
        odd = CLASSES[f"{name}Request"](name=f"{MODEL}/ready", version="")
        if name == "ModelReady":
            assert not ask(channel, name, odd).ready
            continue
        with pytest.raises(grpc.RpcError) as raised:
            ask(channel, name, odd)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_grpc_speaks_tls_when_http_does(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]
        + ["subjectAltName=DNS:localhost", "-out", str(cert), "-keyout", str(key)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    settings = make_settings(
        server={"grpc_port": 0, "tls_cert_file": cert, "tls_key_file": key}
    ).server

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    server = GrpcServer(app, settings, lambda request: None)
    await server.start()
    address, name = f"localhost:{server.port}", f"/{SERVICE}/ServerLive"
    answers = CLASSES["ServerLiveResponse"].FromString
    trusted = grpc.ssl_channel_credentials(cert.read_bytes())
    async with grpc.aio.secure_channel(address, trusted) as channel:
        assert (await channel.unary_unary(name, None, answers)(b"", timeout=30)).live
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            await channel.unary_unary(name, None, answers)(b"", timeout=30)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop()
