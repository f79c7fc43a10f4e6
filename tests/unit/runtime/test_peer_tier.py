"""Blocks that a decode engine fetches from a prefill engine, under the toy engine, whose every
token depends on its KV contents.
"""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.core.interfaces.handover import BlockSource, Handover, Prefilled
from engine.core.shards import doorway
from engine.core.shards import link as link_module
from engine.routing.nodes.make import certificate_digest
from engine.runtime.tiers import peers
from engine.runtime.tiers.base import PeerError
from engine.runtime.tiers.block_server import BlockServer
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.peers import PeerTier
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.tiers import tiered_engine

TOKEN = "0123456789abcdef0123456789abcdef"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"window": 4, "num_window_blocks": 24},
    "states": {"has_state": True, "num_checkpoints": 8},
}


@contextmanager
def serving(tier: HostTier, files: tuple[str, str] | None = None) -> Iterator[BlockSource]:
    server = BlockServer(tier, "127.0.0.1:0", lambda: False, files)
    digest = "" if files is None else certificate_digest(Path(files[0]))
    try:
        yield BlockSource("127.0.0.1", server.serve(TOKEN), TOKEN, digest)
    finally:
        server.close()


def prefilled(tier: HostTier, **options: Any) -> ToyEngine:
    """A prefill engine that has computed the prompt."""
    engine, _ = tiered_engine(tier, **options)
    engine.submit("p", PROMPT, max_tokens=1)
    engine.channel.inbox[-1] = structs.replace(engine.channel.inbox[-1], keeps_blocks=True)
    engine.run()
    return engine


def outgoing(max_bytes: int = 2**20) -> HostTier:
    return HostTier(max_bytes, "lru", None, name="outgoing")


def decode(engine: ToyEngine, source: BlockSource | None, num_cached: int = 0) -> Any:
    done = Prefilled("p", "done" if source else "lost", 0.1, num_cached)
    engine.submit("d", PROMPT, max_tokens=6)
    request = structs.replace(engine.channel.inbox[-1], handover=Handover(done, source))
    engine.channel.inbox[-1] = request
    engine.run()
    engine.check()
    return engine.outcomes["d", 0]


def right(**options: Any) -> list[int]:
    engine = ToyEngine(**options)
    engine.submit("d", PROMPT, max_tokens=6)
    engine.run()
    return engine.outcomes["d", 0].tokens


def fetched(mover: Any) -> tuple[int, int, int]:
    tier = mover.tiers[0]
    return tier.saved_tokens, tier.num_bad, tier.num_errors


def test_the_block_server_continues_after_a_failed_accept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doorway, "PAUSE_S", 0.01)
    accept, faults = socket.socket.accept, [OSError("too many open files")]

    def accept_later(self: socket.socket) -> Any:
        if faults:
            raise faults.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    tier = outgoing()
    prefilled(tier)
    engine, mover = tiered_engine(PeerTier())
    with serving(tier) as source:
        assert decode(engine, source).tokens == right()
    assert fetched(mover)[0] > 0 and not faults


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_engine_continues_from_a_prefill_engines_blocks(shape: str) -> None:
    options = SHAPES[shape]
    tier = outgoing()
    prefilled(tier, **options)
    engine, mover = tiered_engine(PeerTier(), **options)
    with serving(tier) as source:
        answer = decode(engine, source, num_cached=4)
    assert answer.tokens == right(**options)
    assert answer.num_cached == 4, "only what the prefill engine had cached"
    saved, *faults = fetched(mover)
    assert saved == 16 if shape == "plain" else saved >= 8
    assert faults == [0, 0]


def test_without_a_handover_no_peer_is_contacted() -> None:
    def dial(source: BlockSource) -> Any:
        raise AssertionError("a connection was opened")

    engine, mover = tiered_engine(PeerTier(dial))
    assert decode(engine, None).tokens == right() and fetched(mover) == (0, 0, 0)
    assert mover.tiers[0].num_misses == 0


def test_kept_blocks_are_served_after_eviction_from_the_outgoing_tier() -> None:
    """The KV pool still has them, so nothing is computed."""
    tier = outgoing()
    engine = prefilled(tier)
    tier.close()  # forgets all
    engine.submit("again", PROMPT, max_tokens=1)
    engine.channel.inbox[-1] = structs.replace(engine.channel.inbox[-1], keeps_blocks=True)
    engine.run()
    assert tier.num_records >= 8


def test_a_damaged_block_of_a_peer_is_recomputed() -> None:
    tier = outgoing()
    prefilled(tier)
    names = list(tier._records)
    broken = tier._records[names[3]]
    whole, header = broken.payload.copy(), broken.header()
    broken.payload[0] ^= 1  # after the checksum was made

    class Stale(type(broken)):  # type: ignore[misc]
        def header(self) -> bytes:
            return header

    tier._records[names[3]] = Stale(*(getattr(broken, each) for each in broken.__slots__))
    engine, mover = tiered_engine(PeerTier())
    with serving(tier) as source:
        assert decode(engine, source).tokens == right()
    saved, num_bad, _ = fetched(mover)
    assert num_bad == 1 and 0 < saved < 16 and (whole != broken.payload).any()


def test_blocks_of_another_model_are_not_used() -> None:
    tier = outgoing()
    prefilled(tier)
    renamed = outgoing()
    engine, mover = tiered_engine(PeerTier(), identity="other weights")
    ours, _ = tiered_engine(renamed, identity="other weights")
    ours.submit("p", PROMPT, max_tokens=1)
    ours.run()
    for name, foreign in zip(renamed._records, tier._records.values(), strict=True):
        renamed._records[name] = foreign  # under the names that are asked for
    with serving(renamed) as source:
        assert decode(engine, source).tokens == right()
    saved, num_bad, _ = fetched(mover)
    assert saved == 0 and num_bad == 8


def test_a_wrong_peer_token_fetches_nothing() -> None:
    tier = outgoing()
    prefilled(tier)
    with serving(tier) as source:
        engine, mover = tiered_engine(PeerTier())
        stranger = structs.replace(source, token="f" * 32)
        assert decode(engine, stranger).tokens == right() and fetched(mover) == (0, 0, 1)
        tried = PeerTier()
        tried.expect([b"k" * 32], stranger)
        with pytest.raises(PeerError, match="its token is wrong"):
            tried.find([f"{(b'k' * 32).hex()}.full"])


def test_a_peer_that_goes_away_is_not_asked_again() -> None:
    tier = outgoing()
    prefilled(tier)
    asked = []

    def dial(source: BlockSource) -> Any:
        asked.append(source)
        return peers.connect(source)

    engine, mover = tiered_engine(PeerTier(dial))
    with serving(tier) as source:
        pass
    assert decode(engine, source).tokens == right()
    assert fetched(mover) == (0, 0, 1) and len(asked) == 1
    assert mover.tiers[0].is_readable, "others can still be asked"


def certificate(folder: Path, name: str) -> tuple[str, str]:
    files = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-out", files[0], "-keyout", files[1]],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return files


def test_only_the_pinned_tls_certificate_is_trusted(tmp_path: Path) -> None:
    files, others = certificate(tmp_path, "node"), certificate(tmp_path, "other")
    tier = outgoing()
    prefilled(tier)
    with serving(tier, files) as source:
        engine, mover = tiered_engine(PeerTier())
        assert decode(engine, source).tokens == right() and fetched(mover) == (16, 0, 0)
        forged = structs.replace(source, certificate=certificate_digest(Path(others[0])))
        with pytest.raises(ssl.SSLError, match="not that of the prefill node"):
            peers.connect(forged)


def test_an_invalid_peer_message_closes_the_connection() -> None:
    with serving(outgoing()) as source:
        sock, link = peers.connect(source)
        link.send(link_module.encode_frame(["what?"]))
        sock.settimeout(5)
        assert sock.recv(1) == b""
        with socket.create_connection((source.host, source.port), 5) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionError):
                while raw.recv(4096):  # a greeting; then the connection is closed
                    pass
