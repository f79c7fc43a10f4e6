"""A message that is too large fails its request, and never the process at either end: in every
framing of the tree, the sender notices it.
"""

import asyncio
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine
from engine.core.errors import PayloadTooLargeError, UnavailableError
from engine.core.interfaces.request import (
    Abort,
    CachedPrefixes,
    Control,
    ControlReply,
    Deltas,
    FromEngine,
    GenerateRequest,
    SamplingParams,
    Stats,
    ToEngine,
    TokenDelta,
)
from engine.core.interfaces.stats import EngineStats
from engine.core.shards import link as link_module
from engine.core.shards.frames import FrameError, decode_frame
from engine.core.shards.frames import encode_frame as encode_shard
from engine.core.shards.link import TcpLink
from engine.frontend.request_recovery import OpenRequest, OpenRequests
from engine.ipc import transport
from engine.ipc.connection import Connection
from engine.ipc.transport import FrameDecoder, SocketChannel, encode_frame, frames_of
from engine.routing.nodes.agent import Session
from engine.routing.nodes.wire import MAX_UNSENT_RESULT_BYTES
from engine.servers.http_workers.exchange import Exchange
from engine.servers.http_workers.messages import Chunks, Opened
from engine.servers.http_workers.worker import MAX_CHUNK_BYTES, HttpWorker
from tests.support.servers.node_cluster import NoEngine, node, routed

LIMIT = 50_000
# Where lengths precede bytes, and why no sender of them can end the process that receives them.
FRAMINGS = {
    "ipc/transport.py": "encode_frame refuses",
    "core/shards/link.py": "send refuses",
    "core/shards/frames.py": "the lengths are inside a frame",
    "core/shards/ring.py": "a frame is sent in pieces",
    "core/grammar/wire.py": "grammars are parts of HTTP bodies, and answers are short",
    "servers/kserve/tensors.py": "the lengths are inside an HTTP body",
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", LIMIT)
    return LIMIT


def request(name: str = "r", **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=(1, 2), params=SamplingParams(), **fields)


def test_every_module_with_message_framing_is_in_the_table() -> None:
    root = Path(engine.__file__).parent
    framing = re.compile(r"\b(_?LENGTHS?|_BELL)\.pack\(|\bstruct\.pack\(|len\(\w+\)\.to_bytes\(")
    processes = ("ipc", "routing", "servers", "core/shards", "core/grammar", "plugins", "runtime")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(part in str(path.relative_to(root)) for part in processes)
        and framing.search(path.read_text())
    }
    assert {name for name in found if "tiers/record" not in name} <= set(FRAMINGS)


def test_a_delta_that_is_too_large_fails_only_its_request(limit: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        channel: SocketChannel = SocketChannel(ours, ToEngine)
        small = [TokenDelta(f"s{n}", 0, (n,)) for n in range(3)]
        large = TokenDelta("large", 0, (7,), captured=bytes(limit), finish_reason="stop")
        middle = [TokenDelta(f"m{n}", 0, captured=bytes(limit // 2)) for n in range(3)]
        channel.send(Deltas((*small, large, *middle)))
        channel.send(ControlReply(1, True, "x" * limit))
        channel.send(Stats(EngineStats()))
        theirs.settimeout(0.2)
        frames: FrameDecoder = FrameDecoder(FromEngine)
        messages: list[Any] = []
        while not messages or not isinstance(messages[-1], Stats):
            messages += frames.feed(theirs.recv(2**20))
    deltas = [d for each in messages if isinstance(each, Deltas) for d in each.deltas]
    assert [d for d in deltas if d.request_id != "large"] == [*small, *middle]
    (failed,) = [d for d in deltas if d.request_id == "large"]
    assert failed.finish_reason == "error" and failed.error_code == "payload_too_large"
    assert f"{LIMIT:,}" in (failed.error_message or "")
    (reply,) = [each for each in messages if isinstance(each, ControlReply)]
    assert reply.control_id == 1 and not reply.ok


def test_a_request_that_is_too_large_is_a_client_error(limit: int) -> None:
    sent: list[GenerateRequest] = []

    def send(each: GenerateRequest) -> None:
        encode_frame(each)
        sent.append(each)

    requests = OpenRequests(max_revivals=3)
    receiver = SimpleNamespace(engine=None, deliver=lambda *items: None)
    with pytest.raises(PayloadTooLargeError):
        requests.submit(request("large", grammar="x" * limit), receiver, send)
    assert len(requests) == 0
    requests.submit(request("small"), receiver, send)
    assert [each.request_id for each in sent] == ["small"]


def test_a_command_that_is_too_large_is_not_dropped_in_silence(limit: int) -> None:
    with pytest.raises(PayloadTooLargeError):
        frames_of(Control(1, "load_adapter", "x" * limit))
    news = CachedPrefixes(tuple(range(2**40, 2**40 + limit)))
    assert frames_of(news) == []  # nobody waits for it


async def test_a_revived_request_that_is_too_large_fails_alone(limit: int) -> None:
    ended: dict[str, Any] = {}
    sent: list[str] = []

    def receiver(name: str) -> Any:
        return SimpleNamespace(engine=None, deliver=lambda item: ended.update({name: item}))

    def send(each: GenerateRequest) -> None:
        encode_frame(each)
        sent.append(each.request_id)

    requests = OpenRequests(max_revivals=3)
    for name in ("grown", "other"):
        requests.submit(request(name, grammar="x" * (limit - 1500)), receiver(name), send)
    requests.deliver([TokenDelta("grown", 0, tuple(range(2**20, 2**20 + 400)))])
    requests.interrupt(UnavailableError("gone"))
    requests.revive(send)
    assert sent == ["grown", "other", "other"]
    assert isinstance(ended["grown"], PayloadTooLargeError) and "other" not in ended
    adopted = OpenRequest(request("more", grammar="x" * limit), receiver("more"), False)
    requests.take_over(adopted, send)
    assert isinstance(ended["more"], PayloadTooLargeError)


async def test_a_node_stays_connected_when_a_request_is_too_large(limit: int) -> None:
    async with routed(NoEngine()) as server, node(server):
        with pytest.raises(PayloadTooLargeError, match="may have"):
            await server.ask((1, 2, 3), salt="x" * limit)
        assert (await server.ask((1, 2, 3)))[0]
        assert server.names == ["node"]


async def test_a_node_refuses_a_request_that_is_too_large_for_its_engine() -> None:
    def submit(*_: object) -> None:
        raise PayloadTooLargeError("too large")

    session = Session(
        SimpleNamespace(submit=submit),  # type: ignore[arg-type]
        1,
        asyncio.get_running_loop().create_future(),
        lambda: None,
    )
    told: list[Any] = []
    session.connection.send = told.append  # type: ignore[method-assign]
    session._heard(request("r"))
    ((delta,),) = [each.deltas for each in told]
    assert (delta.request_id, delta.error_code) == ("r", "payload_too_large")
    assert session.num_open == 0


async def test_a_result_too_large_for_a_slow_connection_fails_alone() -> None:
    forgotten: list[Any] = []
    link = SimpleNamespace(forget=lambda *each: forgotten.append(each), done=lambda name: None)
    session = Session(link, 1, asyncio.get_running_loop().create_future(), lambda: None)
    told: list[Any] = []
    session.connection.send = told.append  # type: ignore[method-assign]
    full = SimpleNamespace(get_write_buffer_size=lambda: MAX_UNSENT_RESULT_BYTES + 1)
    session.connection.transport = full  # type: ignore[assignment]
    session.forward("large", TokenDelta("own", 0, captured=b"x"))
    session.forward("small", TokenDelta("own", 0, (5,)))
    session._flush()
    (first, second) = told[0].deltas
    assert first.request_id == "large" and first.finish_reason == "error" and len(forgotten) == 1
    assert second == TokenDelta("small", 0, (5,))


async def test_an_http_workers_pipe_refuses_large_messages_and_splits_answers(limit: int) -> None:
    ours, theirs = socket.socketpair()
    received: list[Any] = []
    one: Connection[Any] = Connection(Abort, received.append, lambda: None)
    other: Connection[Any] = Connection(Abort, received.append, lambda: None)
    await one.connect(ours)
    await other.connect(theirs)
    with pytest.raises(PayloadTooLargeError):
        one.send(Abort("x" * limit))
    one.send(Abort("r"))
    async with asyncio.timeout(60):
        while not received:
            await asyncio.sleep(0)
    assert received == [Abort("r")]
    one.abort()
    other.abort()


@pytest.mark.parametrize("is_direct", [False, True])
async def test_an_answer_of_any_size_reaches_its_http_worker_in_messages(is_direct: bool) -> None:
    """Both ways in which an application writes its answer."""
    sent: list[Any] = []
    worker = object.__new__(HttpWorker)  # its process is not needed
    worker._batch, worker._batch_bytes = [], 0
    worker._loop = asyncio.get_running_loop()
    worker._pipe = SimpleNamespace(send=sent.append, is_full=False)  # type: ignore[assignment]
    opened = Opened(1, b"", "GET", "http", "1.1", "/", b"/", b"", [], None, None)
    exchange, body = Exchange(opened, worker), bytes(5 * MAX_CHUNK_BYTES // 2)
    if is_direct:
        exchange.write(body)
    else:
        await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
    worker._flush()
    chunks = [chunk for each in sent if isinstance(each, Chunks) for _, chunk in each.chunks]
    assert sum(map(len, chunks)) == len(body)
    assert all(encode_frame(each) for each in sent)


def test_a_shard_frame_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_FRAME_BYTES", LIMIT)
    listening = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listening.getsockname())
    theirs, _ = listening.accept()
    one, other = TcpLink(ours), TcpLink(theirs)
    one._trust(b"token", "a", "b", is_lead=True)
    other._trust(b"token", "a", "b", is_lead=False)
    one.max_bytes = other.max_bytes = LIMIT
    with pytest.raises(FrameError, match="not sent"):
        one.send(encode_shard(["x" * LIMIT]))
    one.send(encode_shard(["small"]))
    assert decode_frame(other.receive())[0] == ["small"]
    for each in (one, other):
        each.close()
    listening.close()
