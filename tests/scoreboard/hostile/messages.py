"""Hostile conversations: roles, parts, images, calls and their results, few or many."""

import base64
import io
import random
import struct
import zlib
from functools import cache
from typing import Any

from PIL import Image

from tests.scoreboard.hostile.values import text, words


@cache
def image(kind: int) -> bytes:
    """A small image, or one that is broken or says that it is huge."""
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (9, 9, 9)).save(file, ("PNG", "JPEG", "GIF", "WEBP")[kind % 4])
    whole = file.getvalue()
    if kind < 4:
        return whole
    if kind < 8:
        return whole[: len(whole) // 2]
    if kind < 10:
        return _huge(2**31 - 1) if kind == 8 else _huge(20_000)
    return b"" if kind == 10 else b"<svg/>"


def _huge(side: int) -> bytes:
    """A PNG of a few bytes that says it has `side` * `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def image_base64(rng: random.Random) -> str:
    return base64.b64encode(image(rng.choice((0, 0, 0, 1, 2, 3, *range(4, 12))))).decode()


def image_url(rng: random.Random) -> str:
    return rng.choice(
        (
            f"data:image/png;base64,{image_base64(rng)}",
            f"data:image/png;base64,{image_base64(rng)}",
            "data:image/png;base64,####",
            "data:,",
            "http://127.0.0.1:1/a.png",
            "file:///etc/passwd",
            text(rng),
        )
    )


def _part(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"type": "text", "text": words(rng, 3)},
            {"type": "text", "text": text(rng)},
            {"type": "image_url", "image_url": {"url": image_url(rng), "detail": "low"}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "refusal", "refusal": text(rng)},
            {"type": text(rng)},
        )
    )


def content(rng: random.Random, *, sees: bool = False) -> Any:
    """The content of a message; mostly images, if the model `sees`."""
    match rng.choice((1, 2)) if sees and rng.random() < 0.7 else rng.randrange(10):
        case 0:
            return text(rng)
        case 1:
            return [_part(rng) for _ in range(rng.choice((1, 2, 3)))]
        case 2:
            url = image_url(rng)
            one = {"type": "image_url", "image_url": {"url": url}}
            return [one] * rng.choice((1, 2, 64, 65, 3_000))
        case 3:
            return [{"type": "text", "text": text(rng)}] * rng.choice((2, 500))
    return words(rng, 3)


def _call(rng: random.Random) -> dict[str, Any]:
    arguments = rng.choice(('{"a": 1}', "{", "", "[" * 2_000, text(rng), "null"))
    return {
        "id": rng.choice(("call_1", "call_1", text(rng), "x" * 2_000)),
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }


def _turn(rng: random.Random) -> list[dict[str, Any]]:
    calls = [_call(rng)] * rng.choice((1, 1, 2, 200))
    return rng.choice(
        (
            [{"role": "user", "content": content(rng)}],
            [{"role": "system", "content": content(rng)}],
            [{"role": "assistant", "content": content(rng)}],
            [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "call_1", "content": content(rng)},
            ],
            [{"role": "user", "content": words(rng, 2), "name": text(rng)}],
            [{"role": rng.choice(("developer", "function", text(rng))), "content": "a"}],
        )
    )


def messages(rng: random.Random, *, sees: bool = False) -> list[Any]:
    if rng.random() < 0.05:
        return [{"role": "user", "content": "a"}] * rng.choice((50, 300, 4_096, 4_097))
    turns = [_turn(rng) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    is_plain = not sees and rng.random() < 0.6
    said = words(rng, 3) if is_plain else content(rng, sees=sees)
    return [message for turn in turns for message in turn] + [{"role": "user", "content": said}]


def anthropic_messages(rng: random.Random) -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": image_base64(rng)}
    block = rng.choice(
        (
            {"type": "text", "text": text(rng)},
            {"type": "image", "source": source},
            {"type": "tool_use", "id": "a", "name": "look", "input": {"a": text(rng)}},
            {"type": "tool_result", "tool_use_id": "a", "content": text(rng)},
            {"type": "thinking", "thinking": text(rng), "signature": text(rng)},
            {"type": "document", "source": {"type": "text", "data": text(rng)}},
        )
    )
    count = rng.choice((1, 1, 2, 200))
    return rng.choice(
        (
            [{"role": "user", "content": words(rng, 3)}],
            [{"role": "user", "content": [block] * count}],
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": [block]}],
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * count,
        )
    )


def response_input(rng: random.Random) -> Any:
    called = {"type": "function_call", "call_id": "a", "name": "look", "arguments": text(rng)}
    given = {"type": "function_call_output", "call_id": "a", "output": text(rng)}
    shown = {"type": "input_image", "image_url": image_url(rng)}
    return rng.choice(
        (
            words(rng, 3),
            text(rng),
            [{"role": "user", "content": words(rng, 3)}] * rng.choice((1, 2, 300)),
            [{"role": "user", "content": [{"type": "input_text", "text": text(rng)}, shown]}],
            [called, given, {"role": "user", "content": "a"}],
            [given],
            [{"type": "reasoning", "summary": [], "encrypted_content": text(rng)}],
            [{"type": "item_reference", "id": text(rng)}],
            [{"type": text(rng)}],
        )
    )
