"""Files of images: what is no part of the picture is left out, and the rest is bounded
(SEC-25; T5).
"""

import io
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
