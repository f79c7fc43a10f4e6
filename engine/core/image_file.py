"""Leaves out of image files what is no part of the picture, before a decoder reads them.

Decoders collect texts, profiles and comments. They decompress them, and join their pieces one by
one, which takes minutes for a few MiB of them. They also decode a JPEG file once for each of its
scans, and a scan has only a few bytes. So the pieces of a file are counted before it is decoded.
Exif data are a table whose entries may all have the same large value, and only one entry matters:
the orientation. So they are replaced by a table with this entry alone.
"""

import re
import struct
import zlib

MAX_PIECES = 2**16  # chunks, segments or blocks of one file
MAX_SCANS = 128  # of a JPEG file; encoders write about ten
_PNG = b"\x89PNG\r\n\x1a\n"
# Chunks that change the picture, although a decoder may ignore them: transparency, and whether
# there are more frames. The orientation is in another one.
_PNG_CHUNKS = (b"tRNS", b"acTL", b"fcTL", b"fdAT")
_MARKER = re.compile(rb"\xff([\x01-\xfe])", re.DOTALL)
_SCAN = b"\xff\xda"
_ALONE = (0x01, *range(0xD0, 0xDA))  # markers of JPEG without a content
_GIF_IMAGE, _GIF_EXTENSION, _GIF_CONTROL = 0x2C, 0x21, 0xF9
_WEBP_CHUNKS = (b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF")
_WEBP_PROFILE, _WEBP_XMP = 0x20, 0x04  # flags of what is in a file
_EXIF = b"Exif\0\0"
_NO_EXIF = b"MM\0*" + struct.pack(">LHL", 8, 0, 0)
_ORIENTATION = 0x0112
_ENTRY_BYTES = 12
_INTEGERS = {1: "B", 3: "H", 4: "L"}  # types of an entry


def only_picture(data: bytes) -> bytes:
    """The file without texts, comments and color profiles. Raises `ValueError` if it has too many
    pieces. Files of unknown formats are returned as they are.
    """
    if data.startswith(_PNG):
        return _png(data)
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _gif(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    return data


def _orientation_only(exif: bytes) -> bytes:
    """Exif data that have nothing but the orientation. Empty if it is the usual one."""
    exif = exif.removeprefix(_EXIF)
    order = "<" if exif.startswith(b"II") else ">"
    try:
        (start,) = struct.unpack_from(f"{order}L", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
    except struct.error:
        return b""
    table = exif[start + 2 : start + 2 + count * _ENTRY_BYTES]
    table = table[: len(table) - len(table) % _ENTRY_BYTES]
    for tag, kind, length, value in struct.iter_unpack(f"{order}HHL4s", table):
        if tag == _ORIENTATION and kind in _INTEGERS and length == 1:
            (turn,) = struct.unpack_from(order + _INTEGERS[kind], value)
            entry = struct.pack(">HHLHH", _ORIENTATION, 3, 1, turn, 0) if 2 <= turn <= 8 else b""
            return entry and b"MM\0*" + struct.pack(">LH", 8, 1) + entry + bytes(4)
    return b""


def _png(data: bytes) -> bytes:
    kept, start, num_pieces = [_PNG], len(_PNG), 0
    while start + 8 <= len(data):
        length, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        end = start + 12 + length
        num_pieces = _counted(num_pieces)
        if kind == b"eXIf":
            exif = _orientation_only(data[start + 8 : end - 4])
            checksum = zlib.crc32(kind + exif).to_bytes(4, "big")
            kept += [len(exif).to_bytes(4, "big"), kind, exif, checksum] if exif else []
        elif kind[:1].isupper() or kind in _PNG_CHUNKS:  # a capital: what a decoder must know
            kept.append(data[start:end])
        start = end
    return b"".join(kept)


def _jpeg(data: bytes) -> bytes:
    """Segments before the first scan are chosen. All after it is kept."""
    kept, start, num_pieces, has_exif = [data[:2]], 2, 0, False
    while (marker := _MARKER.search(data, start)) is not None and marker[0] != _SCAN:
        start, number = marker.start(), marker[1][0]
        length = int.from_bytes(data[start + 2 : start + 4], "big")
        end = start + 2 + (0 if number in _ALONE else length)
        num_pieces = _counted(num_pieces)
        content = data[start + 4 : end]
        if number == 0xE1 and content.startswith(_EXIF) and not has_exif:
            is_kept, has_exif = False, True
            if exif := _orientation_only(content):
                size = (2 + len(_EXIF) + len(exif)).to_bytes(2, "big")
                kept.append(b"\xff\xe1" + size + _EXIF + exif)
        elif 0xE0 <= number <= 0xEF:  # of applications
            is_kept = content.startswith((b"JFIF", b"Adobe")) and number in (0xE0, 0xEE)
        else:
            is_kept = number != 0xFE  # a comment
        if is_kept:
            kept.append(data[start:end])
        start = end
    if data.count(_SCAN, start) > MAX_SCANS:
        raise ValueError("too many scans")
    return b"".join([*kept, data[start:]])


def _webp(data: bytes) -> bytes:
    kept: list[bytes] = []
    start, num_pieces = 12, 0
    while start + 8 <= len(data):
        kind, length = (
            data[start : start + 4],
            int.from_bytes(data[start + 4 : start + 8], "little"),
        )
        end = start + 8 + length + length % 2
        num_pieces = _counted(num_pieces)
        content = data[start + 8 : start + 8 + length]
        if kind == b"VP8X" and content:
            flags = content[0] & ~(_WEBP_PROFILE | _WEBP_XMP)
            kept += [data[start : start + 8], bytes([flags]), data[start + 9 : end]]
        elif kind == b"EXIF":
            exif = _orientation_only(content) or _NO_EXIF
            kept += [kind, len(exif).to_bytes(4, "little"), exif]
        elif kind in _WEBP_CHUNKS:
            kept.append(data[start:end])
        start = end
    body = b"WEBP" + b"".join(kept)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def _gif(data: bytes) -> bytes:
    start = 13 + _palette_bytes(data[10:11])
    kept, num_pieces = [data[:start]], 0
    while start < len(data):
        kind, label = data[start], data[start + 1 : start + 2]
        first = start
        if kind == _GIF_IMAGE:
            start += 11 + _palette_bytes(data[start + 9 : start + 10])
        elif kind == _GIF_EXTENSION:
            start += 2
        else:
            kept.append(data[start : start + 1])  # the end, or a byte that means nothing
            start, num_pieces = start + 1, _counted(num_pieces)
            continue
        while (size := data[start : start + 1]) not in (b"", b"\0"):
            start, num_pieces = start + 1 + size[0], _counted(num_pieces)
        start, num_pieces = start + 1, _counted(num_pieces)
        if kind == _GIF_IMAGE or label == bytes([_GIF_CONTROL]):
            kept.append(data[first:start])
    return b"".join(kept)


def _palette_bytes(flags: bytes) -> int:
    """The size of the palette that follows, by the flags of a screen or of an image."""
    return 3 * 2 ** (1 + (flags[0] & 7)) if flags and flags[0] & 0x80 else 0


def _counted(num_pieces: int) -> int:
    if num_pieces >= MAX_PIECES:
        raise ValueError("too many pieces")
    return num_pieces + 1
