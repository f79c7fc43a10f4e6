"""The messages between a router and its nodes, and the connection that carries them.

A node opens the connection by an HTTP request, which the server answers with 101 (`dial.py`). Both
prove that they have the node token, and do not send it. From then on both sides send frames: a
length, a msgpack message of a known type, and an HMAC as in `core/shards/link.py`, so nobody in
between can change, repeat or add one. Requests and tokens are the same messages that a frontend
exchanges with its own engine process. Both sides send beats, so that each notices when the other is
gone.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec

from engine.core.build_name import build_name
from engine.core.errors import EngineError, UnavailableError
from engine.core.interfaces.handover import BlockSource, Role
from engine.core.interfaces.request import (
    Abort,
    CachedPrefixes,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    Ready,
)
from engine.core.interfaces.stats import EngineStats
from engine.core.shards.link import SEAL_BYTES, Seal, is_same_bytes
from engine.ipc.transport import (
    LENGTH,
    MAX_FRAME_BYTES,
    FrameDecoder,
    encode_answer,
    encode_frame,
)

log = logging.getLogger(__name__)
Message = TypeVar("Message")

UPGRADE = "engine-node"
BUILD_HEADER = "engine-build"
NONCE_HEADER = "engine-nonce"
PROOF_HEADER = "engine-proof"
CONNECT_PATH = "/v1/nodes/connect"
BEAT_S = 0.2
LOST_AFTER_S = 3.0  # a side that was silent for this long is gone
HELLO_TIMEOUT_S = 5.0
MAX_UNSENT_BYTES = 256 * 2**20
# Pieces of results are not queued behind more than this: their request fails, not the connection.
MAX_UNSENT_RESULT_BYTES = MAX_UNSENT_BYTES // 2


# Names are shown to people: they have no control characters.
Name = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a node, when its engine is loaded."""

    node_id: Name  # random; the same for all connections of one `engine node join`
    name: Name
    model: Name  # the digest of the model's files
    model_name: Name  # for people
    fingerprint: Name  # equal for engines in which a request has the same result
    ready: Ready
    role: Role = "both"
    # Where a prefill node serves its blocks. An empty host is the address that it joins from.
    blocks: BlockSource | None = None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The server accepts the node. `now` is the server's clock, for the times in timelines."""

    name: str
    now: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The server does not accept the node. If `is_final`, it would not do so later either."""

    message: str
    is_final: bool = True


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life."""

    stats: EngineStats | None = None


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node takes no new requests, and leaves when its last one has ended."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The server asks the node to leave."""


def node_build() -> str:
    """The build, as far as it concerns the messages between servers and nodes."""
    names = ("handover", "interp", "request", "snapshot", "stats", "timeline")
    return build_name(
        "routing/nodes/wire.py",
        "routing/nodes/dial.py",
        "routing/nodes/proofs.py",
        "core/shards/link.py",
        "ipc/transport.py",
        "core/prefix_hashes.py",
        *(f"core/interfaces/{name}.py" for name in names),
    )


FromNode = Hello | Beat | Leaving | Deltas | CachedPrefixes | ControlReply
ToNode = Welcome | Refused | Beat | Drain | GenerateRequest | Abort | Control


class SealedFrames:
    """Splits a byte stream into frames, each of which has its seal behind it."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"a message of {length} bytes is over the limit")
            end = LENGTH.size + length
            if len(self._buffer) < end + SEAL_BYTES:
                break
            frame, seal = bytes(self._buffer[:end]), self._buffer[end : end + SEAL_BYTES]
            if not is_same_bytes(seal, self._seal.next(frame)):
                raise EngineError("a message was changed on its way")
            del self._buffer[: end + SEAL_BYTES]
            yield frame


class Connection(asyncio.Protocol, Generic[Message]):
    """One end of the connection. `on_message` is called for each message, in order, and `on_lost`
    once at the end. `trust` is called before the first message.
    """

    transport: asyncio.Transport
    _sent: Seal
    _sealed: SealedFrames

    def __init__(
        self,
        message_type: Any,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._frames: FrameDecoder[Message] = FrameDecoder(message_type)
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()

    def trust(self, sent: Seal, received: Seal) -> None:
        self._sent, self._sealed = sent, SealedFrames(received)

    @property
    def silent_s(self) -> float:
        return self._loop.time() - self.heard_at

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            for frame in self._sealed.feed(data):
                for message in self._frames.feed(frame):
                    self._on_message(message)
        except Exception:  # what follows a message that can't be read can't be read either
            log.exception("the connection to %s broke", self.transport.get_extra_info("peername"))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. Raises `UnavailableError` if the other side is gone, or does not read
        what was sent, and `PayloadTooLargeError` if a request is too large to be sent.
        """
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()
        if self.transport.is_closing():
            raise UnavailableError("The node is gone.", retry_after=1.0)
        is_request = isinstance(message, GenerateRequest)
        for frame in [encode_frame(message)] if is_request else encode_answer(message):
            self.transport.write(frame + self._sent.next(frame))

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be sent that no pieces of results should be added."""
        return self.transport.get_write_buffer_size() > MAX_UNSENT_RESULT_BYTES

    def tell(self, message: msgspec.Struct) -> None:
        """Queue a message, or do nothing if the other side is gone or does not read."""
        with contextlib.suppress(UnavailableError):
            self.send(message)
