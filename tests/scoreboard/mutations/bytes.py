"""Byte-level mutations that ignore the file format."""

import random
import struct

EDGES = (0, 1, 2, 7, 8, 31, 64, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 1)
EDGES += (2**31, 2**32 - 1, 2**32, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)


def damaged(rng: random.Random, content: bytes, header: int) -> bytes:
    """Mutate bytes. Three of four mutations are in the first `header` bytes."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not damaged:
            break
        reach = len(damaged) if rng.random() < 0.25 else min(header, len(damaged))
        rng.choice(_WOUNDS)(rng, damaged, rng.randrange(max(reach, 1)))
    return bytes(damaged)


def _flip_bit(rng: random.Random, content: bytearray, at: int) -> None:
    content[at] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, content: bytearray, at: int) -> None:
    content[at] = rng.randrange(256)


def _set_integer(rng: random.Random, content: bytearray, at: int) -> None:
    size = rng.choice((4, 8))
    raw = struct.pack("<Q", rng.choice(EDGES))[:size]
    content[at : at + size] = raw


def _cut(rng: random.Random, content: bytearray, at: int) -> None:
    del content[at:]


def _remove(rng: random.Random, content: bytearray, at: int) -> None:
    del content[at : at + rng.choice((1, 4, 8, 100))]


def _insert(rng: random.Random, content: bytearray, at: int) -> None:
    content[at:at] = rng.randbytes(rng.choice((1, 4, 8, 100)))


def _repeat(rng: random.Random, content: bytearray, at: int) -> None:
    piece = content[at : at + rng.choice((4, 8, 64))]
    content[at:at] = piece


def _blank(rng: random.Random, content: bytearray, at: int) -> None:
    length = min(rng.choice((4, 8, 64, 1000)), len(content) - at)
    content[at : at + length] = rng.choice((b"\0", b"\xff")) * length


_WOUNDS = (
    *(_flip_bit, _flip_bit, _set_byte, _set_integer, _set_integer),
    *(_cut, _remove, _insert, _repeat, _blank),
)
