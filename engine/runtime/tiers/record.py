"""The format in which a tier stores one block, and the key by which a block is found.

A key is a hash chain: it covers the tokens of the block, all tokens before it, the tenant's salt,
and the identity of the cache. The identity covers whatever changes the bytes of a block: weights,
framework, numerics and layout. So a block is found only by an engine that would compute the same.

A record is a header, then the bytes of the block. The header has the key, the parent's key, the
tokens, and a checksum for each piece of the bytes. A piece has at most 1 MiB.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.runtime.model_runner import Group
from engine.runtime.sequence import Tokens, packed

MAGIC = b"ENGINEKV"
LAYOUT_VERSION = 1  # version of the record and of the bytes in it
PIECE_BYTES = 2**20
MAX_TOKENS = 4096  # more tokens than any block has
KEY_BYTES = 32

# The kinds of records. A latent block is a full block that has latents instead of keys and values.
KINDS: tuple[Literal["full", "window", "state", "latent"], ...] = (
    "full",
    "window",
    "state",
    "latent",
)

_HEAD = struct.Struct("<8sHBxIIQ32s32s32s")
_CRC = struct.Struct("<I")


class BadRecordError(Exception):
    """A record is damaged, or is not the record that was looked for. The message says why."""


@dataclass(frozen=True, slots=True)
class RecordShape:
    """What all blocks of one group have in common, in one cache."""

    group: Group
    kind: str
    num_tokens: int
    num_bytes: int

    @property
    def header_bytes(self) -> int:
        pieces = -(-self.num_bytes // PIECE_BYTES)
        return _HEAD.size + 4 * self.num_tokens + _CRC.size * (pieces + 1)

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.num_bytes


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Where a block belongs: its key, its parent's key, and its tokens."""

    key: bytes
    parent: bytes
    tokens: bytes  # int32, little-endian


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a record's header."""

    kind: Literal["full", "window", "state", "latent"]
    identity: bytes
    place: BlockKey
    num_bytes: int
    checksums: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        return self.shape.header_bytes

    @property
    def shape(self) -> RecordShape:
        group: Group = "full"
        if self.kind == "window" or self.kind == "state":
            group = self.kind
        return RecordShape(group, self.kind, len(self.place.tokens) // 4, self.num_bytes)

    @property
    def token_ids(self) -> list[int]:
        found: list[int] = np.frombuffer(self.place.tokens, "<i4").tolist()
        return found


def identity_of(parts: Iterable[str]) -> bytes:
    """The identity of a cache, from texts that describe whatever changes the bytes of a block."""
    text = "\x1f".join((f"layout {LAYOUT_VERSION}", *parts))
    return hashlib.sha256(text.encode()).digest()


def root_key(identity: bytes, salt: str, adapter: str = "") -> bytes:
    """The parent of the first block of every prefix of a tenant."""
    text = f"{len(salt)}:{salt}{adapter}"
    return hashlib.sha256(identity + text.encode()).digest()


def next_key(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


def chain(root: bytes, tokens: Tokens, block_size: int, known: list[bytes]) -> None:
    """Append the keys of all full blocks of `tokens` to `known`, which has those of the first."""
    width = block_size * packed().itemsize
    data = tokens.tobytes()
    parent = known[-1] if known else root
    for start in range(len(known) * width, len(data) - width + 1, width):
        parent = next_key(parent, data[start : start + width])
        known.append(parent)


def encode_header(
    shape: RecordShape, identity: bytes, place: BlockKey, payload: memoryview
) -> bytes:
    """The header of a record. `payload` are the bytes of the block."""
    assert len(payload) == shape.num_bytes, (len(payload), shape)
    head = _HEAD.pack(
        MAGIC,
        LAYOUT_VERSION,
        KINDS.index(shape.kind),
        shape.num_tokens,
        PIECE_BYTES,
        shape.num_bytes,
        identity,
        place.parent,
        place.key,
    )
    sums = [
        _CRC.pack(zlib.crc32(payload[start : start + PIECE_BYTES]))
        for start in range(0, len(payload), PIECE_BYTES)
    ]
    whole = b"".join((head, place.tokens, *sums))
    return whole + _CRC.pack(zlib.crc32(whole))


def decode_header(data: bytes | bytearray) -> Header:
    """Read and check the header at the start of `data`. Raises `BadRecordError`."""
    if len(data) < _HEAD.size:
        raise BadRecordError("truncated")
    fields = _HEAD.unpack_from(data)
    magic, version, kind, num_tokens, piece, num_bytes, identity, parent, key = fields
    if magic != MAGIC or version != LAYOUT_VERSION or kind >= len(KINDS) or piece != PIECE_BYTES:
        raise BadRecordError("not a record of this version")
    num_pieces = -(-num_bytes // PIECE_BYTES)
    end = _HEAD.size + 4 * num_tokens + _CRC.size * num_pieces
    if num_tokens > MAX_TOKENS or end + _CRC.size > len(data):
        raise BadRecordError("truncated")
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        raise BadRecordError("the header's checksum differs")
    tokens = bytes(data[_HEAD.size : _HEAD.size + 4 * num_tokens])
    if next_key(parent, tokens) != key:
        raise BadRecordError("the key is not that of the tokens")
    sums = struct.unpack_from(f"<{num_pieces}I", data, _HEAD.size + 4 * num_tokens)
    return Header(KINDS[kind], identity, BlockKey(key, parent, tokens), num_bytes, sums)


def check_header(header: Header, shape: RecordShape, identity: bytes, place: BlockKey) -> None:
    """Raise `BadRecordError` unless this is the header of the block at `place`."""
    if header.identity != identity:
        raise BadRecordError("of another model or other numerics")
    if header.place != place or header.kind != shape.kind:
        raise BadRecordError("of another block")
    if header.num_bytes != shape.num_bytes:
        raise BadRecordError("of another size")


def check_payload(header: Header, payload: memoryview) -> None:
    """Raise `BadRecordError` unless the bytes of the block are those that were stored."""
    if len(payload) != header.num_bytes:
        raise BadRecordError("truncated")
    for index, expected in enumerate(header.checksums):
        start = index * PIECE_BYTES
        if zlib.crc32(payload[start : start + PIECE_BYTES]) != expected:
            raise BadRecordError("a checksum differs")
