"""The tier that fetches blocks from the engines of prefill nodes, over TCP.

A request that was handed over names the engine that has its blocks. Only those blocks are looked
for, and only there. Both sides prove that they have the engine's token (`core/shards/link.py`), and
each record is checked like a record of any tier. Nothing is stored.
"""

import hashlib
import hmac
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.core.build_name import build_name
from engine.core.errors import EngineError
from engine.core.interfaces.handover import PEERS, BlockSource
from engine.core.shards.frames import Array, FrameError, decode_frame, encode_frame
from engine.core.shards.link import LINK_FILES, TcpLink
from engine.runtime.model_runner import Bytes
from engine.runtime.tiers.base import Loaded, PeerError, Record, Wanted

CONNECT_S = 2.0
ANSWER_S = 2.0  # max wait for bytes of an answer
MAX_ANSWER_BYTES = 2**18  # of an answer without a block
MAX_EXPECTED = 2**17
MAX_CONNECTIONS = 64
_TIERS = "runtime/tiers"


def block_build() -> str:
    """The build, as far as it concerns the exchange of blocks."""
    return build_name(
        *LINK_FILES, f"{_TIERS}/record.py", f"{_TIERS}/block_server.py", f"{_TIERS}/peers.py"
    )


def connect(source: BlockSource) -> tuple[socket.socket, TcpLink]:
    """Open a connection. Raises `OSError` or `EngineError` if the other side is not the source."""
    sock = socket.create_connection((source.host, source.port), CONNECT_S)
    try:
        if source.certificate:
            sock = _with_tls(sock, source)
        link = TcpLink(sock)
        link.join(source.token.encode(), block_build())
        sock.settimeout(ANSWER_S)
    except BaseException:
        sock.close()
        raise
    return sock, link


def _with_tls(sock: socket.socket, source: BlockSource) -> socket.socket:
    """The certificate is known, so it needs no signature."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    wrapped = context.wrap_socket(sock)
    found = hashlib.sha256(wrapped.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(found, source.certificate):
        wrapped.close()
        raise ssl.SSLError("the certificate is not that of the prefill node")
    return wrapped


class PeerTier:
    """Blocks of other engines. `dial` opens a connection to one of them."""

    name = PEERS
    takes_blocks = False
    num_bytes = num_records = 0

    def __init__(
        self, dial: Callable[[BlockSource], tuple[socket.socket, TcpLink]] = connect
    ) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._expected: OrderedDict[str, BlockSource] = OrderedDict()  # key in hex -> who has it
        self._open: OrderedDict[BlockSource, tuple[socket.socket, TcpLink]] = OrderedDict()

    def expect(self, keys: Sequence[bytes], source: BlockSource) -> None:
        """Blocks with these keys are at `source`."""
        with self._lock:
            for key in keys:
                self._expected[key.hex()] = source
                self._expected.move_to_end(key.hex())
            while len(self._expected) > MAX_EXPECTED:
                self._expected.popitem(last=False)

    def find(self, names: Sequence[str]) -> list[bool]:
        source = self._source_of(names[0]) if names else None
        if source is None:
            return [False] * len(names)
        asked = [name for name in names if self._source_of(name) == source]
        with self._talking(source) as link:
            link.max_bytes = MAX_ANSWER_BYTES
            link.send(encode_frame(["find", asked]))
            (answers,), _ = decode_frame(link.receive())
            has = {name for name, is_there in zip(asked, answers, strict=True) if is_there}
        return [name in has for name in names]

    def load(self, wanted: Wanted, rows: Bytes) -> list[Loaded]:
        names = [wanted.name(index) for index in range(len(wanted.places))]
        source = self._source_of(names[0])
        if source is None:
            return [Loaded.MISSING] * len(names)
        results: list[Loaded] = []
        with self._talking(source) as link:
            link.max_bytes = wanted.shape.record_bytes + MAX_ANSWER_BYTES
            link.send(encode_frame(["load", names]))
            while len(results) < len(names):
                try:
                    _, (header, payload) = decode_frame(link.receive())
                except FrameError:  # what follows can't be trusted either
                    results.append(Loaded.BAD)
                    self._open.pop(source)[0].close()
                    break
                results.append(_taken(wanted, len(results), header, payload, rows))
        return results + [Loaded.MISSING] * (len(names) - len(results))

    def store(self, records: Sequence[Record]) -> int:
        return 0

    def use(self, names: Sequence[str]) -> None:
        pass

    def tidy_up(self) -> None:
        pass

    def close(self) -> None:
        for sock, _ in self._open.values():
            sock.close()
        self._open.clear()

    def _source_of(self, name: str) -> BlockSource | None:
        with self._lock:
            return self._expected.get(name.partition(".")[0])

    @contextmanager
    def _talking(self, source: BlockSource) -> Iterator[TcpLink]:
        """A connection to an engine. If it fails, `PeerError` is raised, and the engine's blocks
        are not looked for again.
        """
        try:
            if source not in self._open:
                self._open[source] = self._dial(source)
            self._open.move_to_end(source)
            yield self._open[source][1]
        except (OSError, EngineError, ValueError) as error:
            if source in self._open:
                self._open.pop(source)[0].close()
            with self._lock:
                for key in [key for key, each in self._expected.items() if each == source]:
                    del self._expected[key]
            raise PeerError(f"blocks of {source.host}: {error}") from error
        while len(self._open) > MAX_CONNECTIONS:
            self._open.popitem(last=False)[1][0].close()


def _taken(
    wanted: Wanted, index: int, header: Array | None, payload: Array | None, rows: Bytes
) -> Loaded:
    """Check a record that was asked for, and copy its block into its row."""
    if header is None or payload is None:
        return Loaded.MISSING
    if payload.nbytes != rows[index].nbytes:
        return Loaded.BAD
    if not wanted.is_valid(index, header.tobytes(), payload.data):
        return Loaded.BAD
    rows[index] = payload
    return Loaded.OK
