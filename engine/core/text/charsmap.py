"""Checks the character map of a SentencePiece normalizer before the `tokenizers` library uses it.

A map is a 32-bit size, a trie of that many bytes, and replacement texts that end with a zero byte.
The trie is a double array of 32-bit units. The library follows its offsets without bounds checks
of its own, so a damaged map would make it panic in the middle of a request.
"""

import struct
from collections import defaultdict

from engine.core.errors import ModelFormatError

_MAX_BYTES = 16 << 20  # real maps have about 240 KiB
_IS_VALUE = 1 << 31  # set in units that hold the position of a replacement text


def check_charsmap(data: bytes, where: str) -> None:
    """Raise `ModelFormatError` if a lookup in this map could fail. `where` names the map."""
    problem = _find_problem(data)
    if problem:
        raise ModelFormatError(
            f"{where} is not a SentencePiece character map: {problem}. Download the file again."
        )


def _find_problem(data: bytes) -> str | None:
    if not 4 <= len(data) <= _MAX_BYTES:
        return f"it has {len(data)} bytes"
    size = int.from_bytes(data[:4], "little")
    if size == 0 or size % 4 or 4 + size > len(data):
        return f"its trie of {size} bytes does not fit into {len(data)} bytes"
    units = struct.unpack(f"<{size // 4}I", data[4 : 4 + size])
    try:
        texts = data[4 + size :].decode("utf-8")
    except UnicodeDecodeError:
        return "its replacement texts are not UTF-8"
    starts = {0, *_character_starts(texts)}
    return _check_trie(units, starts)


def _character_starts(texts: str) -> list[int]:
    """The byte offset after each character of the text."""
    offsets, offset = [], 0
    for char in texts:
        offset += len(char.encode())
        offsets.append(offset)
    return offsets


def _check_trie(units: tuple[int, ...], starts: set[int]) -> str | None:
    """Visit every node of the trie. A node's children are at `base ^ label`, so they are in the
    same block of 256 units as its base.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for position, unit in enumerate(units):
        if not unit & _IS_VALUE and unit & 0xFF:
            children[position ^ (unit & 0xFF)].append(position)
    pending, seen = [_offset(units[0])], set[int]()
    while pending:
        base = pending.pop()
        if base in seen:
            continue
        seen.add(base)
        if base | 0xFF >= len(units):
            return "its trie points outside itself"
        for child in children[base]:
            unit = units[child]
            following = child ^ _offset(unit)
            names_text = unit >> 8 & 1
            if names_text and (
                following >= len(units) or units[following] & ~_IS_VALUE not in starts
            ):
                return "its trie names a text that does not exist"
            pending.append(following)
    return None


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)
