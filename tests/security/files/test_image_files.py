"""Files of images: what is no part of the picture is left out, and the rest is bounded
(SEC-25; T5).
"""

import io
import struct
import warnings
import zlib
from typing import Any

import pytest
from PIL import Image

from engine.core.errors import InvalidRequestError
from engine.core.image_file import only_picture
from engine.frontend.images import decode, size_of


def jpeg(**options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("L", (64, 64), 40).save(file, "JPEG", **options)
    return file.getvalue()


def with_scans(count: int) -> bytes:
    """A JPEG file in which one scan is repeated."""
    data = jpeg(progressive=True)
    tables = [place for place in range(len(data)) if data[place : place + 2] == b"\xff\xc4"]
    before, scan, after = data[: tables[2]], data[tables[1] : tables[2]], data[tables[2] :]
    return before + count * scan + after


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    assert decode(with_scans(20), "here").size == (64, 64)
    with pytest.raises(InvalidRequestError, match="too many scans"):
        size_of(with_scans(2_000), "here")


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def test_metadata_of_a_jpeg_is_not_collected() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    file = io.BytesIO()
    Image.new("RGB", (64, 32)).save(file, "JPEG", exif=turned)
    data = file.getvalue()
    more = [
        segment(0xE1, b"Exif\0\0x"),
        segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0x"),
        segment(0xE2, b"ICC_PROFILE\0\1\1x"),
        segment(0xE2, b"MPF\0x"),
        segment(0xED, b"Photoshop 3.0\0x"),
        segment(0xFE, b"a comment"),
    ]
    start = data.index(b"\xff\xdb")  # behind the orientation
    assert only_picture(data[:start] + 9 * b"".join(more) + data[start:]) == data
    assert decode(data, "here").size == (32, 64)
    with pytest.raises(InvalidRequestError, match="too many pieces"):
        size_of(data[:2] + 200_000 * segment(0xFE, b"") + data[2:], "here")


def test_comments_of_a_gif_are_not_collected() -> None:
    file = io.BytesIO()
    image = Image.new("P", (8, 8))
    image.putpalette([9, 9, 9, 200, 0, 0])
    image.save(file, "GIF", transparency=0)
    data = file.getvalue()
    comment = b"\x21\xfe" + 5 * (b"\xff" + 255 * b"c") + b"\0"
    start = data.index(b"\x21\xf9")
    assert only_picture(data[:start] + comment + data[start:]) == data
    assert decode(data, "here").getpixel((0, 0)) == (255, 255, 255)
    endless = data[:start] + b"\x21\xfe" + 200_000 * b"\1c" + b"\0" + data[start:]
    with pytest.raises(InvalidRequestError, match="too many pieces"):
        size_of(endless, "here")


def crowded_exif(order: str, num_entries: int) -> bytes:
    """Exif data with an orientation, and with entries that all have the same large value."""
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}LH", 8, num_entries + 1)
    size = 14 + 12 * num_entries
    entries = [struct.pack(f"{order}HHLHH", 0x0112, 3, 1, 6, 0)]
    entries += [
        struct.pack(f"{order}HHLL", 0x200 + number, 1, size, 8) for number in range(num_entries)
    ]
    return head + b"".join(entries) + bytes(4)


def with_exif(kind: str, exif: bytes) -> bytes:
    file = io.BytesIO()
    options: dict[str, Any] = {"exif": b"Exif\0\0" + exif}
    if kind == "PNG":
        options = {}
    Image.new("RGB", (64, 32)).save(file, kind, **options)
    data = file.getvalue()
    if kind == "PNG":
        start = data.index(b"IDAT") - 4
        chunk = b"eXIf" + exif
        chunk = len(exif).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        return data[:start] + chunk + data[start:]
    return data


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("kind", "num_entries"), [("JPEG", 5_000), ("PNG", 60_000), ("WEBP", 60_000)]
)
def test_exif_tables_are_replaced_by_their_orientation(
    kind: str, num_entries: int, order: str
) -> None:
    data = with_exif(kind, crowded_exif(order, num_entries))
    assert len(only_picture(data)) < 1_000 < len(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow would warn of each entry, in the server's log
        assert decode(data, "here").size == (32, 64)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "exif", [b"", b"II", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff\1"]
)
def test_broken_exif_leaves_the_picture_as_it_is(kind: str, exif: bytes) -> None:
    assert decode(with_exif(kind, exif), "here").size == (64, 32)


def test_profiles_and_unknown_chunks_of_a_webp_are_not_collected() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (8, 8), (200, 0, 0, 0)).save(file, "WEBP", lossless=True, xmp=b"x" * 5_000)
    data = file.getvalue()
    unknown = b"JUNK" + (1).to_bytes(4, "little") + b"j\0"
    assert only_picture(data + unknown) == only_picture(data)
    assert len(only_picture(data)) < 1_000
    assert decode(data, "here").getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(InvalidRequestError, match="too many pieces"):
        size_of(data + 200_000 * unknown, "here")
