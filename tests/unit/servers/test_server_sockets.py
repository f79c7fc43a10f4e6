"""What only a real socket shows: order in time, disconnects, slow readers, draining, clients."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.core.errors import ConfigError, InferenceError, ModelError
from engine.core.listening import bind_socket
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.run import HttpServer
from engine.servers.serving import sse
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import (
    LiveServer,
    chat,
    events_of,
    live_server,
    make_settings,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", params=[1, 2], ids=["one-frontend", "two-frontends"])
def shared_server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live_server(server={"frontends": request.param}) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """A server whose backend is as new, and which must be idle again afterwards."""
    shared_server.backend.reset()
    yield shared_server
    wait_until(lambda: shared_server.backend.num_open == 0)
    wait_until(lambda: shared_server.services.lifecycle.num_admitted == 0)


def client_of(server: LiveServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", **options)


def leave(connection: socket.socket, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_chunks_arrive_while_the_answer_is_generated(server: LiveServer) -> None:
    server.backend.token_s = 0.02
    pieces = []
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=chat(stream=True)) as r:
        for piece in r.iter_text():
            pieces.append(piece)
            if server.backend.num_open:
                assert "[DONE]" not in piece
    assert len(pieces) >= 6
    assert events_of("".join(pieces))[-1] == "[DONE]"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_stops_the_backend(
    server: LiveServer, stream: bool, phase: str, reset: bool
) -> None:
    backend = server.backend
    backend.prefill_s = 60 if phase == "prefill" else 0
    backend.token_s = 60
    with server.connect() as connection:
        server.post_raw(connection, "/v1/chat/completions", chat(stream=stream))
        if stream and phase == "decode":
            while b"Hello" not in connection.recv(65536):
                pass
        wait_until(lambda: backend.num_open == 1)
        leave(connection, reset)
        wait_until(lambda: backend.num_open == 0)
    assert backend.num_cut_short == 1


@pytest.mark.parametrize("reset", [False, True])
def test_disconnect_stops_the_first_of_pipelined_requests(server: LiveServer, reset: bool) -> None:
    backend = server.backend
    backend.token_s = 60
    with server.connect() as connection:
        for _ in range(3):
            server.post_raw(connection, "/v1/chat/completions", chat())
        wait_until(lambda: backend.num_open == 1)
        leave(connection, reset)
        wait_until(lambda: backend.num_open == 0)
    assert backend.num_cut_short == 1


def test_disconnect_stops_every_prompt_of_a_list(server: LiveServer) -> None:
    server.backend.token_s = 60
    with server.connect() as connection:
        body = {"model": MODEL, "prompt": ["a", "b", "c"]}
        server.post_raw(connection, "/v1/completions", body)
        wait_until(lambda: server.backend.num_open == 3)
    wait_until(lambda: server.backend.num_open == 0)


def test_one_clients_disconnect_does_not_affect_another(server: LiveServer) -> None:
    server.backend.token_s = 0.05
    with server.connect() as leaver:
        server.post_raw(leaver, "/v1/chat/completions", chat(stream=True))
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=chat(stream=True)) as stays:
            lines = stays.iter_text()
            first = next(lines)
            leaver.close()
            text = first + "".join(lines)
    content = [e["choices"][0]["delta"].get("content", "") for e in events_of(text)[:-1]]
    assert "".join(content) == "Hello from a fake model."


def test_headers_and_sse_comments_are_sent_during_a_long_prefill(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.01)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    server.backend.prefill_s = 0.3
    url = server.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=chat(stream=True)) as response:
        assert server.backend.num_open == 1  # headers are here, the answer is not
        text = "".join(response.iter_text())
    assert text.count(": keep-alive\n\n") >= 3
    assert text.index('"role"') < text.index(": keep-alive") < text.index("Hello")
    assert events_of(text)[-1] == "[DONE]"


def test_a_late_refusal_is_an_error_event(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.01)
    server.backend.prefill_s = 0.1
    server.backend.failure = InferenceError("too late for a status")
    response = httpx.post(server.url + "/v1/chat/completions", json=chat(stream=True))
    assert response.status_code == 200
    assert events_of(response.text)[-1]["error"]["code"] == "inference_error"


@pytest.mark.seconds
@pytest.mark.parametrize("frontends", [1, 2])
def test_a_slow_reader_gets_coalesced_chunks_and_the_whole_text(frontends: int) -> None:
    # More than the buffers of both sockets hold, so that writing has to wait for the reader.
    words = [f"{i:05d}" + "w" * 16_000 for i in range(2000)]
    backend = FakeBackend(words)
    settings = {"frontends": frontends}
    with live_server(backend, server=settings) as server, server.connect() as connection:
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 4096}
        server.post_raw(connection, "/v1/completions", body)
        # The backend is never held up by a client that does not read.
        wait_until(lambda: backend.num_ended == 1)
        assert backend.num_cut_short == 0
        received = bytearray()
        while b"[DONE]" not in received[-64:]:
            received += connection.recv(1 << 20)
    lines = bytes(received).split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(words)
    assert len(events) < len(words)


def test_a_client_that_stops_reading_is_disconnected(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.1)
    server.backend.words = ("x" * 100_000,) * 4000
    server.backend.token_s = 0.001
    with server.connect() as connection:
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 4000}
        server.post_raw(connection, "/v1/completions", body)
        wait_until(lambda: server.backend.num_cut_short == 1)


@pytest.mark.parametrize("frontends", [1, 2])
def test_draining_lets_streams_finish(frontends: int) -> None:
    backend = FakeBackend(["x"] * 1000)
    backend.token_s = 0.05
    with live_server(backend, server={"frontends": frontends}) as server:
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=chat(stream=True)) as response:
            pieces = response.iter_text()
            text = next(pieces)
            server.signal()
            wait_until(lambda: server.services.lifecycle.is_draining)
            assert httpx.get(server.url + "/readyz").status_code == 503
            assert httpx.post(url, json=chat()).status_code == 503
            backend.token_s = 0
            text += "".join(pieces)
        assert events_of(text)[-1] == "[DONE]"
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert backend.is_stopped


@pytest.mark.parametrize(
    ("ending", "frontends"), [("deadline", 1), ("second signal", 1), ("second signal", 2)]
)
def test_streams_that_outlive_the_drain_get_an_error_event(ending: str, frontends: int) -> None:
    backend = FakeBackend()
    backend.token_s = 60
    seconds = 0.1 if ending == "deadline" else 60
    limits = {"drain_timeout_s": seconds, "frontends": frontends}
    with live_server(backend, server=limits) as server:
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=chat(stream=True)) as response:
            pieces = response.iter_text()
            text = next(pieces)
            server.signal()
            if ending == "second signal":
                server.signal()
            text += "".join(pieces)
        assert events_of(text)[-1]["error"]["code"] == "service_unavailable"
        server.thread.join(60)
        assert not server.thread.is_alive()


@pytest.mark.seconds
def test_sigterm_ends_the_process_with_code_0() -> None:
    script = textwrap.dedent(
        """
        from engine.core.config_schema import Settings
        from engine.core.observability.metrics import Metrics
        from engine.servers.app import create_app
        from engine.core.listening import address_of, bind_socket
        from engine.servers.run import run_server
        from tests.support.fakes.fake_backend import MODEL, FakeBackend

        settings = Settings(server={"port": 0})
        sock = bind_socket(settings)
        app = create_app(settings, FakeBackend(), Metrics(MODEL))
        run_server(app, sock, lambda seconds: print(address_of(sock), flush=True))
        print("ended in order", flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        wait_until(lambda: httpx.get(url + "/readyz").status_code == 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == "ended in order\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.seconds
async def test_a_backend_that_cannot_start_ends_the_server() -> None:
    backend = FakeBackend()
    backend.start_error = ModelError("no such file")
    settings = make_settings()
    app = create_app(settings, backend, Metrics(MODEL))
    with pytest.raises(ModelError, match="no such file"):
        await HttpServer(app, bind_socket(settings)).serve()
    assert backend.is_stopped


def test_a_port_in_use_is_reported_before_loading() -> None:
    with bind_socket(make_settings()) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="another program is using it"):
            bind_socket(make_settings(server={"port": port}))


def test_openai_client_reads_answers(server: LiveServer) -> None:
    client = client_of(server)
    messages: Any = chat()["messages"]
    whole = client.chat.completions.create(model=MODEL, messages=messages)
    assert whole.choices[0].message.content == "Hello from a fake model."
    assert whole.usage is not None and whole.usage.total_tokens == 8
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == "Hello from a fake model."
    completion = client.completions.create(model=MODEL, prompt=["a", "b"])
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_openai_client_raises_typed_errors(server: LiveServer) -> None:
    client = client_of(server, max_retries=3)
    messages: Any = chat()["messages"]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=messages, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.code == "invalid_request"
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    server.backend.failure = InferenceError("broken")
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=messages)
    # A failure that would only repeat itself is not tried again.
    assert len(server.backend.requests) == 1
    server.backend.fail_after = 2
    with pytest.raises(openai.APIError, match="broken"):
        list(client.chat.completions.create(model=MODEL, messages=messages, stream=True))


def test_openai_client_gets_429_at_the_limits() -> None:
    backend = FakeBackend()
    key = "s" * 32
    limits = {"api_key": key, "max_concurrent_requests": 1}
    messages: Any = chat()["messages"]
    with live_server(backend, server=limits) as server:
        with pytest.raises(openai.AuthenticationError):
            client_of(server).models.list()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
        backend.token_s = 3600  # who waits for its end has waited for the test's
        running = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as limited:
            client.chat.completions.create(model=MODEL, messages=messages)
        assert limited.value.response.headers["retry-after"] == "1"
        running.close()
        wait_until(lambda: backend.num_open == 0)


def test_connections_use_tcp_nodelay() -> None:
    """asyncio sets TCP_NODELAY for sockets whose protocol is named, and for no others."""
    with bind_socket(make_settings(server={"port": 0})) as sock:
        assert sock.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("path", ["/livez", "/v1/chat/completions", "/" + "x" * 20_000])
def test_names_of_headers_have_capitals(server: LiveServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = connection.recv(65_536).partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    names = [line.partition(b":")[0] for line in head]
    assert b"Content-Type" in names and b"Content-Length" in names
    assert names == [name.title() for name in names]
