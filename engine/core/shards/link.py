"""Frames over TCP, for ranks on other machines.

Both sides first prove that they have the same token, without sending it: each answers the other's
random number with an HMAC. Until then, frames are short and must arrive soon.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import threading
from pathlib import Path

from engine.core.build_name import ADVICE
from engine.core.errors import ConfigError
from engine.core.shards.frames import FrameError, decode_frame, encode_frame
from engine.core.shards.ring import RingClosedError

_LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 2**31
_MAX_GREETING_BYTES = 4096
_GREETING_S = 10.0
MIN_TOKEN_BYTES = 16
# What every build that speaks over a `TcpLink` has in common.
LINK_FILES = ("core/shards/frames.py", "core/shards/link.py")


class TcpLink:
    """One end of a connection. Several threads may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._sending = threading.Lock()
        self._max_bytes = _MAX_GREETING_BYTES

    @property
    def address(self) -> str:
        """This machine's address, as the other side sees it."""
        return str(self._sock.getsockname()[0])

    @property
    def peer(self) -> str:
        return str(self._sock.getpeername()[0])

    def send(self, frame: bytes) -> None:
        """Raises `FrameError`, and sends nothing, if the other side would refuse the frame."""
        if len(frame) > self._max_bytes:
            raise FrameError(f"a frame of {len(frame)} bytes is over the limit and is not sent")
        try:
            with self._sending:
                self._sock.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise RingClosedError(f"the connection is closed: {error}") from error

    def receive(self) -> bytearray:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > self._max_bytes:
            raise FrameError(f"a frame of {length} bytes is over the limit")
        return self._read(length)

    def close(self) -> None:
        self._sock.close()

    def greet(self, token: bytes, build: str) -> None:
        """The engine's side: let the other side prove that it has the token. `build` is the name
        of this build, which must be the other side's too.
        """
        self._sock.settimeout(_GREETING_S)
        ours = secrets.token_hex(16)
        self.send(encode_frame([build, ours]))
        their_build, theirs, proof = self._strings(3)
        if not hmac.compare_digest(proof, _proof(token, "join", ours, theirs)):
            self._refuse("its token is wrong")
        if their_build != build:
            self._refuse(f"it runs engine {their_build}, and this engine is {build}; {ADVICE}")
        self.send(encode_frame(["", _proof(token, "lead", theirs, ours)]))
        self._trust()

    def join(self, token: bytes, build: str) -> None:
        """The rank's side: prove that it has the token, and let the engine prove it too."""
        self._sock.settimeout(_GREETING_S)
        _, theirs = self._strings(2)
        ours = secrets.token_hex(16)
        self.send(encode_frame([build, ours, _proof(token, "join", theirs, ours)]))
        refusal, proof = self._strings(2)
        if refusal:
            raise ConfigError(f"the engine refused this connection: {refusal}")
        if not hmac.compare_digest(proof, _proof(token, "lead", ours, theirs)):
            raise ConfigError("the engine has another token; check --token-file")
        self._trust()

    def _refuse(self, reason: str) -> None:
        self.send(encode_frame([reason, ""]))
        raise ConfigError(f"the connection from {self.peer} was refused: {reason}")

    def _trust(self) -> None:
        self._sock.settimeout(None)
        self._max_bytes = MAX_FRAME_BYTES

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
                count = self._sock.recv_into(view[done:])
            except OSError as error:
                raise RingClosedError(f"the connection is closed: {error}") from error
            if not count:
                raise RingClosedError("the other side closed the connection")
            done += count
        return buffer


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


def _proof(token: bytes, role: str, first: str, second: str) -> str:
    message = f"{role} {first} {second}".encode()
    return hmac.new(token, message, hashlib.sha256).hexdigest()
