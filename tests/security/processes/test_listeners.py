"""Every socket on which this project listens, in one table, and what strangers may do there: be
silent, send junk, or stop in the middle, five hundred at once. A good peer is served meanwhile
(SEC-11, SEC-60; T1, T2, T5).
"""

import asyncio
import random
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest

import engine
from engine.core.config_schema import Settings
from engine.core.config_types import NodeSettings, ShardSettings
from engine.core.errors import ConfigError, EngineError
from engine.core.interfaces.handover import BlockSource
from engine.core.shards import doorway as doorway_module
from engine.core.shards.doorway import MAX_PENDING, Doorway
from engine.core.shards.frames import FrameError, decode_frame, encode_frame
from engine.core.shards.link import TcpLink
from engine.core.shards.ring import RingClosedError
from engine.routing.nodes.dial import check, endpoint_of
from engine.runtime.model_runner import RunnerConfig
from engine.runtime.tiers import peers
from engine.runtime.tiers.block_server import BlockServer
from engine.runtime.tiers.host import HostTier
from engine.servers.http.protocol import raise_file_limit
from engine.servers.kserve.grpc_messages import CLASSES, SERVICE
from engine.servers.kserve.grpc_server import GrpcServer
from engine.torch.execution.distributed import remote
from tests.support.servers.live_server import LiveServer, free_port, live_server, wait_until

TOKEN = "0123456789abcdef0123456789abcdef"
KEY = "client-key-0123456789abcdef"
NUM_STRANGERS = 500
MAX_GROWTH_BYTES = 150 * 2**20
# Where in the source something listens, or a port is bound. A new place belongs into this table and
# into `LISTENERS`.
PLACES = {
    "core/listening.py": "HTTP and probes",
    "core/shards/doorway.py": "shards and blocks",
    "servers/kserve/grpc_server.py": "gRPC",
    "torch/execution/distributed/collectives.py": "the ranks' store",
    "torch/execution/distributed/remote.py": "a free port, not kept",
    "routing/ray_nodes/actors.py": "a free port, not kept",
    "backends/external/listening.py": "the port of an external engine, on loopback",
    "cli/ops/docs.py": "the documentation, on loopback",
}
LISTENS = re.compile(
    r"create_server\(|\.listen\(|start_server\(|start_unix_server\(|create_unix_server\(|sock\.bind\("
    r"|add_insecure_port|add_secure_port|TCPStore\(|HTTPServer\(|serve_forever"
)


def test_every_module_that_opens_a_listening_socket_is_in_the_table() -> None:
    root = Path(engine.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if LISTENS.search(path.read_text(encoding="utf-8")) and "tokenizer" not in path.name
    }
    assert found == set(PLACES)


def test_nothing_listens_beyond_localhost_by_default() -> None:
    settings = Settings()
    assert settings.server.host == "127.0.0.1"  # HTTP, probes, gRPC, metrics and nodes
    assert ShardSettings().listen is None and NodeSettings().block_listen is None
    server = BlockServer(HostTier(2**20, "lru", None), "", lambda: False)
    port = server.serve(TOKEN)
    own = psutil.Process().net_connections("inet")
    assert {each.laddr.ip for each in own if each.laddr.port == port} == {"127.0.0.1"}
    server.close()
    for every in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="every interface"):
            remote.check_interface(every)


# --- listeners, each with a call that a good peer makes ---

Good = tuple[int, Callable[[], None]]
Served = Iterator[Good]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    ports = {"probe_port": 0, "grpc_port": 0}
    with live_server(server={"api_key": KEY, "node_token": TOKEN} | ports) as server:
        yield server


@contextmanager
def http(server: LiveServer) -> Served:
    headers = {"authorization": f"Bearer {KEY}"}

    def call() -> None:
        answer = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30)
        assert answer.status_code == 200

    yield server.port, call


@contextmanager
def probes(server: LiveServer) -> Served:
    def call() -> None:
        assert httpx.get(f"{server.probe_url}/livez", timeout=30).status_code == 200

    yield int(server.probe_url.rpartition(":")[2]), call


@contextmanager
def by_grpc(server: LiveServer) -> Served:
    (made,) = [each for each in server.services.components if isinstance(each, GrpcServer)]

    def call() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{made.port}") as channel:
            name, answer = f"/{SERVICE}/ServerMetadata", CLASSES["ServerMetadataResponse"]
            metadata = [("authorization", f"Bearer {KEY}")]
            ask = channel.unary_unary(name, None, answer.FromString)
            assert ask(b"", timeout=30, metadata=metadata).name == "engine"

    yield made.port, call


@contextmanager
def nodes(server: LiveServer) -> Served:
    def call() -> None:
        asyncio.run(check(endpoint_of(server.url, TOKEN)))
        with pytest.raises(EngineError, match="token"):
            asyncio.run(check(endpoint_of(server.url, "f" * 32)))

    yield server.port, call


@contextmanager
def blocks(server: LiveServer) -> Served:
    made = BlockServer(HostTier(2**20, "lru", None), "127.0.0.1:0", lambda: False)
    port = made.serve(TOKEN)

    def call() -> None:
        sock, link = peers.connect(BlockSource("127.0.0.1", port, TOKEN))
        link.send(encode_frame(["find", ["none"]]))
        assert decode_frame(link.receive())[0] == [[False]]
        sock.close()

    yield port, call
    made.close()


@contextmanager
def shards(server: LiveServer) -> Served:
    """An engine that waits for two ranks: the first call joins, and so does the last."""
    port, joined = free_port(), list[remote.RemoteRank]()
    config = replace(
        RunnerConfig("cpu", "float32", 16, 1, 1, 64, 1),
        remote_ranks=2,
        shard_listen=f"127.0.0.1:{port}",
        shard_token=TOKEN,
    )
    waiting = threading.Thread(target=lambda: joined.extend(remote.open_remotes(config, 1)))
    waiting.start()
    wait_until(lambda: is_open(port), 30)
    links: list[TcpLink] = []

    def call() -> None:
        link = TcpLink(connected(port))
        link.join(TOKEN.encode(), remote.shard_build())
        links.append(link)
        assert decode_frame(link.receive())[0] == ["rank", len(links)]

    yield port, call
    waiting.join(30)
    assert len(joined) == 2, "the engine got its ranks"
    for each in (*links, *joined):
        each.close() if isinstance(each, TcpLink) else each.kill()


LISTENERS = [http, probes, by_grpc, nodes, blocks, shards]

# --- strangers ---


def framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def strange(rng: random.Random) -> list[bytes]:
    """What a stranger sends: nothing, junk, halves of greetings and of requests."""
    upgrade = b"GET /v1/nodes/connect HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\n"
    return [
        b"",
        rng.randbytes(1),
        rng.randbytes(4000),
        "pröof-√-\u202e".encode() * 20,
        struct.pack("<Q", 2**63) + b"x" * 100,
        struct.pack("<Q", 4000) + b"\x91" * 100,  # it stops in the middle
        framed(b"\x91" * 4000),
        framed(struct.pack("<II", 2000, 2) + b"\x91" * 2000),
        framed(encode_frame(["build", "nonce", "pröof \ud7ff"])),
        framed(encode_frame(["build", "nonce", "0" * 64])),
        framed(encode_frame([], [np.zeros(3)])),
        framed(encode_frame([{}, None, 2**63])),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x01\x05" + rng.randbytes(200),
        b"GET / HTTP/1.1\r\nhost: ",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999\r\n\r\n{",
        upgrade + b"upgrade: engine-node\r\nauthorization: Bearer \xff\xfe\r\n\r\n" + bytes(100),
        upgrade + b"upgrade: engine-node\r\nauthorization: Bearer x\r\n",
    ]


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30)


@pytest.mark.parametrize("listener", LISTENERS, ids=lambda each: each.__name__)
def test_unauthenticated_connections_do_not_delay_valid_clients(
    listener: Callable[[LiveServer], AbstractContextManager[Good]], server: LiveServer
) -> None:
    raise_file_limit()
    rng = random.Random(7)
    with listener(server) as (port, call):
        call()
        before = psutil.Process().memory_info().rss
        strangers = []
        for number in range(NUM_STRANGERS):
            sent = strange(rng)
            sock = connected(port)
            with suppress(OSError):  # it was closed already
                sock.sendall(sent[number % len(sent)])
                if number % 3 == 2:
                    sock.shutdown(socket.SHUT_WR)
            strangers.append(sock)
        if listener is not shards:
            call()
        grown = psutil.Process().memory_info().rss - before
        assert grown < MAX_GROWTH_BYTES, f"{grown >> 20} MiB"
        call()
        for sock in strangers:
            sock.close()


# --- what the doorway of shards and blocks does besides ---


@contextmanager
def doorway() -> Iterator[tuple[int, list[TcpLink]]]:
    found: list[TcpLink] = []
    made = Doorway(
        ("127.0.0.1", 0), TOKEN.encode(), "b", lambda link, _: found.append(link), "tests"
    )
    yield made.port, found
    made.close()


def test_silent_peers_are_bounded_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with doorway() as (port, _):
        before = threading.active_count()
        silent = [connected(port) for _ in range(3 * MAX_PENDING)]
        TcpLink(connected(port)).join(TOKEN.encode(), "b")
        assert threading.active_count() - before <= 2 * MAX_PENDING
        for sock in silent:
            sock.close()
    assert sum("was closed" in each.message for each in caplog.records) == 1


def test_a_peer_that_sends_byte_by_byte_hits_the_same_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.core.shards.link.GREETING_S", 0.3)
    with doorway() as (port, _):
        sock, ended = connected(port), False
        sock.settimeout(0.02)
        for _ in range(1000):
            try:
                sock.sendall(b"\x00")
                ended = sock.recv(4096) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                break
        assert ended


def test_tampered_repeated_or_reordered_frames_are_refused() -> None:
    """Somebody in between passes the greeting on, and then changes what is sent."""
    for change in ("none", "bit", "repeat", "swap", "drop"):
        with doorway() as (port, found):
            sock = connected(port)
            link = TcpLink(sock)
            link.join(TOKEN.encode(), "b")
            sent: list[bytes] = []
            link._sock = _Recorded(sent)
            for number in range(3):
                link.send(encode_frame(["step", number]))
            first, second, third = sent
            changed = {
                "none": [first, second, third],
                "bit": [first[:-1] + bytes([first[-1] ^ 1])],
                "repeat": [first, first],
                "swap": [second, first],
                "drop": [first, third],
            }[change]
            sock.sendall(b"".join(changed))
            wait_until(lambda: bool(found), 30)  # noqa: B023 - called here
            if change == "none":
                got = [decode_frame(found[0].receive())[0][1] for _ in range(3)]
                assert got == [0, 1, 2]
            else:
                with pytest.raises(FrameError, match="changed on its way"):
                    for _ in range(2):
                        found[0].receive()
            sock.close()


class _Recorded:
    """Takes the place of a socket, and keeps what is sent."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(data)


def test_invalid_block_requests_of_peers_are_refused() -> None:
    made = BlockServer(HostTier(2**20, "lru", None), "127.0.0.1:0", lambda: False)
    source = BlockSource("127.0.0.1", made.serve(TOKEN), TOKEN)
    for question in (
        ["list", []],
        ["find", [1]],
        ["load", [None]],
        ["find", [""] * 2**18],
        [[], 1],
    ):
        _, link = peers.connect(source)
        link.send(encode_frame(question))
        with pytest.raises(RingClosedError):
            link.receive()
    made.close()


def test_every_session_needs_its_own_token_proof() -> None:
    """What one session sent proves nothing in another one."""
    with doorway() as (port, found):
        TcpLink(connected(port)).join(TOKEN.encode(), "b")
        other = TcpLink(connected(port))
        other._strings(2)
        other.send(encode_frame(["b", secrets.token_hex(16), "0" * 64]))
        refusal, _ = other._strings(2)
        assert refusal == "its token is wrong" and len(found) <= 1
    assert doorway_module.MAX_PENDING < NUM_STRANGERS
