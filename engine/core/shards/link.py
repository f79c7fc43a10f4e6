"""Frames over TCP, for ranks and blocks on other machines.

Both sides first prove that they have the same token, without sending it: each answers the other's
random number with an HMAC. Until then, frames are short and must arrive soon. From then on each
frame has an HMAC over its number and its bytes, with a key made of the token and both random
numbers, one for each direction. So nobody in between can change, repeat, drop or add a frame. By
TLS, frames have no HMAC, because TLS does the same. Without TLS, frames can be read on their way.
"""

import hashlib
import hmac
import secrets
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

from engine.core.build_name import ADVICE
from engine.core.errors import ConfigError
from engine.core.shards.frames import FrameError, decode_frame, encode_frame
from engine.core.shards.ring import RingClosedError

_LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 2**31
_MAX_GREETING_BYTES = 4096
GREETING_S = 10.0  # max duration of a whole greeting
_MAX_SHOWN = 100  # characters of another build's name in messages
MIN_TOKEN_BYTES = 16
# What every build that speaks over a `TcpLink` has in common.
LINK_FILES = ("core/shards/frames.py", "core/shards/link.py")


class Seal:
    """Makes the HMACs of the frames of one direction, in their order."""

    num_bytes = hashlib.sha256().digest_size

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def next(self, frame: bytes | bytearray) -> bytes:
        mac = self._keyed.copy()
        mac.update(_LENGTH.pack(self._number))
        mac.update(frame)
        self._number += 1
        return mac.digest()

    def is_next(self, frame: bytes | bytearray, seal: bytes | bytearray) -> bool:
        """Whether the seal is that of this frame, after those that came before it."""
        return hmac.compare_digest(seal, self.next(frame))


class TcpLink:
    """One end of a connection. Several threads may send; one receives. `max_bytes` is the max
    length of a received frame.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._sending = threading.Lock()
        self.max_bytes = _MAX_GREETING_BYTES
        self._deadline: float | None = None
        self._sent: Seal | None = None
        self._received: Seal | None = None
        self.peer = str(sock.getpeername()[0])

    @property
    def address(self) -> str:
        """This machine's address, as the other side sees it."""
        return str(self._sock.getsockname()[0])

    def send(self, frame: bytes) -> None:
        """Raises `FrameError`, and sends nothing, if the other side would refuse the frame."""
        if len(frame) > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {len(frame)} bytes is over the limit and is not sent")
        try:
            with self._sending:
                self._await_until_deadline()
                seal = b"" if self._sent is None else self._sent.next(frame)
                self._sock.sendall(b"".join((_LENGTH.pack(len(frame)), seal, frame)))
        except OSError as error:
            raise RingClosedError(f"the connection is closed: {error}") from error

    def receive(self) -> bytearray:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > self.max_bytes:
            raise FrameError(f"a frame of {length} bytes is over the limit")
        if self._received is None:
            return self._read(length)
        seal, frame = self._read(Seal.num_bytes), self._read(length)
        if not self._received.is_next(frame, seal):
            raise FrameError("a frame was changed on its way")
        return frame

    def close(self) -> None:
        self._sock.close()

    def greet(self, token: bytes, build: str, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """The engine's side: let the other side prove that it has the token. `build` is the name
        of this build, which must be the other side's too.
        """
        self._deadline = time.monotonic() + GREETING_S
        ours = secrets.token_hex(16)
        self.send(encode_frame([build, ours]))
        their_build, theirs, proof = self._strings(3)
        if not is_same(proof, proof_of(token, "join", ours, theirs)):
            self._refuse("its token is wrong")
        if their_build != build:
            told = their_build[:_MAX_SHOWN]
            self._refuse(f"it runs engine {told}, and this engine is {build}; {ADVICE}")
        self.send(encode_frame(["", proof_of(token, "lead", theirs, ours)]))
        self._trust(token, ours, theirs, is_lead=True)
        self.max_bytes = max_bytes

    def join(self, token: bytes, build: str) -> None:
        """The rank's side: prove that it has the token, and let the engine prove it too."""
        self._deadline = time.monotonic() + GREETING_S
        _, theirs = self._strings(2)
        ours = secrets.token_hex(16)
        self.send(encode_frame([build, ours, proof_of(token, "join", theirs, ours)]))
        refusal, proof = self._strings(2)
        if refusal:
            raise ConfigError(f"the engine refused this connection: {refusal}")
        if not is_same(proof, proof_of(token, "lead", ours, theirs)):
            raise ConfigError("the engine has another token; check --token-file")
        self._trust(token, theirs, ours, is_lead=False)
        self.max_bytes = MAX_FRAME_BYTES

    def _refuse(self, reason: str) -> None:
        self.send(encode_frame([reason, ""]))
        raise ConfigError(f"the connection from {self.peer} was refused: {reason}")

    def _trust(self, token: bytes, leads: str, joins: str, *, is_lead: bool) -> None:
        self._deadline = None
        self._sock.settimeout(None)
        if isinstance(self._sock, ssl.SSLSocket):
            return
        self._sent, self._received = seals_of(token, leads, joins, is_lead=is_lead)

    def _strings(self, count: int) -> list[str]:
        values, _ = decode_frame(self.receive())
        if len(values) != count or not all(isinstance(each, str) for each in values):
            raise FrameError("the other side is no engine")
        return values

    def _read(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view, done = memoryview(buffer), 0
        while done < length:
            try:
                self._await_until_deadline()
                count = self._sock.recv_into(view[done:])
            except OSError as error:
                raise RingClosedError(f"the connection is closed: {error}") from error
            if not count:
                raise RingClosedError("the other side closed the connection")
            done += count
        return buffer

    def _await_until_deadline(self) -> None:
        """Let the next call wait only for what is left of the greeting, so that a side that sends
        byte by byte gets no more time than others.
        """
        if self._deadline is None:
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the greeting took too long")
        self._sock.settimeout(left)


def read_token(path: Path) -> bytes:
    """The token in a file, without white space around it."""
    try:
        token = path.expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    return check_token(token)


def check_token(token: bytes) -> bytes:
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"the token of shards is shorter than {MIN_TOKEN_BYTES} characters; make one with "
            "openssl rand -hex 32"
        )
    return token


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"'{address}' is no address; write HOST:PORT")
    return host.strip("[]"), int(port)


def seals_of(token: bytes, leads: str, joins: str, *, is_lead: bool) -> tuple[Seal, Seal]:
    """The seals of what this side sends and receives, from the random numbers of both sides."""
    keys = [proof_of(token, f"frames of {role}", leads, joins) for role in ("lead", "join")]
    own, other = keys if is_lead else keys[::-1]
    return Seal(own.encode()), Seal(other.encode())


def proof_of(token: bytes, role: str, first: str, second: str) -> str:
    """What only those can tell who have the token, for two random numbers."""
    message = f"{role} {first} {second}".encode()
    return hmac.new(token, message, hashlib.sha256).hexdigest()


def is_same(given: str, expected: str) -> bool:
    """Compares proofs in constant time. What was given may be any text."""
    return hmac.compare_digest(given.encode(), expected.encode())
