"""Names a prefix of a prompt by a hash, so that machines can tell each other what they have cached.

A prompt is cut into units of `UNIT_TOKENS`. The hash of a unit covers its tokens, all tokens before
it, and the salt of the request. So equal hashes mean equal prefixes of one tenant. An engine
reports the hashes of what its prefix cache has, and a router computes those of a prompt.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence

# Tokens per hash. It is a multiple of the usual block size, so that the table of a router stays
# small. Larger blocks have several hashes each.
UNIT_TOKENS = 64
# Longer prefixes are not compared: what follows would hardly change the choice of an engine.
MAX_UNITS = 2048
_HASH_BYTES = 8


def root_hash(salt: str) -> bytes:
    """The parent of the first unit of every prompt with this salt."""
    return hashlib.blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()


def next_hash(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a unit, from the hash before it and its own tokens (int32, little-endian)."""
    return hashlib.blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()


def as_number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def prompt_hashes(salt: str, prompt: Sequence[int]) -> list[int]:
    """The hashes of all whole units of a prompt, up to `MAX_UNITS`. The last token of a prompt is
    always computed, so a unit that ends with it does not count.
    """
    count = min((len(prompt) - 1) // UNIT_TOKENS, MAX_UNITS)
    data = array("i", prompt[: count * UNIT_TOKENS]).tobytes()
    parent, width, blake2b = root_hash(salt), 4 * UNIT_TOKENS, hashlib.blake2b
    digests = [
        parent := blake2b(parent + data[start : start + width], digest_size=_HASH_BYTES).digest()
        for start in range(0, count * width, width)
    ]
    return list(struct.unpack(f"<{count}Q", b"".join(digests)))
