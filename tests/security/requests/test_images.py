"""Images of requests: hostile files are refused, and hosts on the web are reached only if the
settings name them and all their addresses are public (SEC-23, SEC-25; T5).
"""

import asyncio
import io
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from engine.architectures.vision import ImageProcessing, VisionConfig
from engine.core.errors import InvalidRequestError, RateLimitError, UnavailableError
from engine.core.interfaces.backend import IMAGE_MARK
from engine.core.interfaces.request import GenerateRequest, ImageInput, SamplingParams
from engine.core.memory import MemoryRoom
from engine.frontend import images as images_module
from engine.frontend.held_images import HeldImages
from engine.frontend.images import (
    decode,
    prepare_image,
    prepare_images,
    size_of,
    tile_sizes,
)
from engine.runtime.requests.images import ImageAccount, ImageStore
from engine.servers.schema.images import RemoteImage, image_from_base64, image_from_url
from engine.servers.serving import remote_images
from engine.servers.serving.remote_images import fetch_image, is_public, with_loaded_images


def png(width: int = 40, height: int = 30) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def animation(kind: str) -> bytes:
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its few bytes do not have."""
    data = bytearray(png())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def saved(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, kind)
    return file.getvalue()


HOSTILE = {
    "empty": b"",
    "no image": b"%PDF-1.7 no image",
    "an SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a format that is not read": saved("TIFF"),
    "another": saved("ICO"),
    "cut off": png()[:-200],
    "only a header": png()[:40],
    "a GIF of two frames": animation("GIF"),
    "a PNG of two frames": animation("PNG"),
    "a WebP of two frames": animation("WEBP"),
    "huge": claiming(60_000, 60_000),
    "one pixel too large": claiming(16_000_001, 1),
    "claims more than it has": claiming(4_000, 3_999),
    "no pixels": claiming(0, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_image_files_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        decode(HOSTILE[name], "messages[0].content")
    error = refused.value.body()["error"]
    assert refused.value.status == 400 and error["code"] == "invalid_image"


def test_an_image_with_too_many_pixels_is_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(self: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    for name in ("huge", "one pixel too large"):
        with pytest.raises(InvalidRequestError, match="more than 16000000 pixels"):
            decode(HOSTILE[name], "messages[0].content")


@pytest.mark.parametrize("size", [(65_536, 1), (1, 16_000_000)])
def test_an_extremely_long_image_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="side of the image has more than 65535"):
        size_of(claiming(*size), "messages[0].content")


@pytest.mark.parametrize("size", [(1, 1), (1, 5_000), (9_000, 1)])
def test_images_of_unusual_sizes_are_decoded(size: tuple[int, int]) -> None:
    assert decode(png(*size), "messages[0].content").size == size


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://example.com/a.png", "//example.com/a.png", "data:", 7, None),
        *("data:text/html;base64,AAAA", "data:image/png,AAAA", "data:image/png;base64,A*A="),
        *("data:image/svg+xml;base64,AAAA", "http://" + "a" * 3_000),
    ],
)
def test_image_urls_of_other_schemes_are_refused(url: Any) -> None:
    with pytest.raises(InvalidRequestError):
        image_from_url(url, "here")


def test_image_base64_is_strict() -> None:
    assert image_from_base64("AAEC", "image/png", "here") == b"\x00\x01\x02"
    for data in ("AAE", "AA EC", "", None):
        with pytest.raises(InvalidRequestError):
            image_from_base64(data, "image/png", "here")


INSIDE = (
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "255.255.255.255", "224.0.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    *("2001:0:7f00:1::", "64:ff9b:1::1", "2001:db8::1", "240.0.0.1", "192.0.2.1"),
)


@pytest.mark.parametrize("address", INSIDE)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


def test_public_addresses_are_recognized_as_public() -> None:
    assert all(is_public(ip_address(each)) for each in ("8.8.8.8", "2606:4700::6810:85e5"))


class Resolver:
    """Answers lookups, and counts them. A second lookup gives another address (rebinding)."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.num_lookups = 0

    async def __call__(self, host: str, port: int, **_: Any) -> list[Any]:
        self.num_lookups += 1
        found = self.addresses if self.num_lookups == 1 else ("169.254.169.254",)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resolver]:
    def use(*addresses: str) -> Resolver:
        resolver = Resolver(*addresses)

        async def look_up(_: Any, *arguments: Any, **options: Any) -> list[Any]:
            return await resolver(*arguments, **options)

        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
        return resolver

    return use


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def download(*_: Any) -> bytes:
        raise AssertionError("a connection is made")

    monkeypatch.setattr(remote_images, "_download", download)


REFUSED = [
    "http://ok\\@169.254.169.254/",
    "http://user@example.com/",
    "http://user:pass@example.com/",
    "http://example.com#@169.254.169.254/",
    "http://example.com?@169.254.169.254/",
    "http://exa mple.com/",
    "http://example.com:99999999/",
    "http:///path",
]


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize("url", REFUSED)
async def test_urls_that_parsers_read_differently_are_refused_without_a_lookup(
    url: str, resolve: Any
) -> None:
    resolver = resolve("8.8.8.8")
    with pytest.raises(InvalidRequestError):
        await fetch_image(RemoteImage(url, "here"), ("*",))
    assert resolver.num_lookups == 0


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize("addresses", [("10.0.0.1",), ("8.8.8.8", "127.0.0.1"), ()])
async def test_a_host_that_resolves_to_a_private_address_is_refused(
    addresses: Any, resolve: Any
) -> None:
    """Names, and numbers that are names to a parser but addresses to the system."""
    for url in ("http://example.com/a.png", "http://2852039166/", "http://0177.0.0.1/"):
        resolve(*addresses)
        with pytest.raises(InvalidRequestError, match="not public|not valid"):
            await fetch_image(RemoteImage(url, "here"), ("*",))


@pytest.mark.usefixtures("no_connection")
async def test_only_listed_image_hosts_are_resolved(resolve: Any) -> None:
    resolver = resolve("8.8.8.8")
    image = RemoteImage("http://example.com/a.png", "here")
    with pytest.raises(InvalidRequestError, match="fetches no images"):
        await fetch_image(image, ())
    with pytest.raises(InvalidRequestError, match="from this host"):
        await fetch_image(image, ("example.org",))
    assert resolver.num_lookups == 0


class Host:
    """A web server on this machine, which tests reach as if it were public."""

    def __init__(self) -> None:
        self.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
        self.drips = False
        self.asked = b""
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(self.reply)
        while self.drips:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch, resolve: Any) -> AsyncIterator[Host]:
    monkeypatch.setattr(remote_images, "is_public", lambda _: True)
    made = Host()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://pictures.example:{server.sockets[0].getsockname()[1]}/a.png?size=1"
    made.resolver = resolve("127.0.0.1")
    yield made
    made.drips = False
    server.close()


async def fetched(host: Any) -> bytes:
    return await fetch_image(RemoteImage(host.url, "here"), ("pictures.example",))


async def test_an_image_is_fetched_from_the_address_that_was_checked(host: Any) -> None:
    assert await fetched(host) == b"abc"
    assert host.resolver.num_lookups == 1
    assert host.asked.startswith(b"GET /a.png?size=1 HTTP/1.1\r\n")
    assert b"\r\nhost: pictures.example:" in host.asked.lower()


async def test_redirects_errors_and_compressed_data_are_refused(host: Any) -> None:
    place = b"location: http://169.254.169.254/\r\n"
    for head in (
        b"302 Found\r\n" + place,
        b"404 Not Found\r\n",
        b"200 OK\r\ncontent-encoding: gzip\r\n",
    ):
        host.reply = b"HTTP/1.1 " + head + b"content-length: 0\r\n\r\n"
        host.num_connections = 0
        host.resolver.num_lookups = 0
        with pytest.raises(InvalidRequestError):
            await fetched(host)
        assert host.num_connections == 1


async def test_image_download_size_and_time_are_limited(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_images, "MAX_BYTES", 2)
    with pytest.raises(InvalidRequestError, match="more than"):
        await fetched(host)
    monkeypatch.setattr(remote_images, "MAX_BYTES", 10**9)
    monkeypatch.setattr(remote_images, "TIMEOUT_S", 0.3)
    host.reply, host.drips = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n", True
    host.resolver.num_lookups = 0
    with pytest.raises(InvalidRequestError, match="did not arrive"):
        await fetched(host)


SMOLVLM = VisionConfig(
    kind="idefics3",
    image_token_id=1,
    placeholder_id=1,
    end_id=None,
    image_size=512,
    patch_size=16,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    intermediate_size=3072,
    norm_eps=1e-6,
    merge=4,
    output_size=576,
    processing=ImageProcessing(longest_edge=2048, splits=True),
)
GEMMA = replace(SMOLVLM, kind="gemma3", image_size=896, patch_size=14, end_id=2, placeholder_id=3)
QWEN = replace(
    SMOLVLM,
    kind="qwen2_5_vl",
    image_size=28,
    window_size=112,
    processing=ImageProcessing(min_pixels=56 * 56, max_pixels=28 * 28 * 16384),
)


@pytest.mark.parametrize("vision", [SMOLVLM, GEMMA, QWEN], ids=lambda each: each.kind)
@pytest.mark.parametrize("size", [(1, 1), (30, 40), (640, 480), (13, 2000), (4000, 4000)])
def test_tile_counts_before_decoding_equal_those_after_decoding(
    vision: VisionConfig, size: tuple[int, int]
) -> None:
    file = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6  # the picture lies on its side
    Image.new("RGB", size).save(file, "PNG", exif=turned)
    counted = tile_sizes(*size_of(file.getvalue(), "x"), vision)
    if vision is QWEN and max(size) > 150 * min(size):
        return
    tiles = prepare_image(file.getvalue(), vision, NoMarks(), "x").tiles
    assert sum(3 * w * h for w, h, _ in counted) == sum(len(tile.pixels) for tile in tiles)
    assert [count for *_, count in counted] == [tile.count for tile in tiles]


class NoMarks:
    def token_id(self, text: str) -> None:
        return None


def asked(*images: bytes, per_message: int = 64) -> list[dict[str, Any]]:
    messages = [images[i : i + per_message] for i in range(0, len(images), per_message)]
    return [{"content": IMAGE_MARK * len(each), "images": list(each)} for each in messages]


@pytest.mark.parametrize(
    ("images", "vision", "rule"),
    [
        pytest.param([png()] * 3000, SMOLVLM, "at most 256 images", id="3,000 tiny images"),
        pytest.param([png()] * 9, SMOLVLM, "MiB of pixels for the model", id="tiles in sum"),
        pytest.param([png()] * 21, GEMMA, "MiB of pixels for the model", id="large tiles in sum"),
        pytest.param([claiming(4000, 3999)] * 5, GEMMA, "pixels in sum", id="pixels in sum"),
        pytest.param([claiming(3000, 3000)], QWEN, "more tokens than the context", id="tokens"),
    ],
)
def test_the_pixels_of_all_images_are_counted_before_decoding(
    images: list[bytes], vision: VisionConfig, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    with pytest.raises(InvalidRequestError, match=rule) as refused:
        prepare_images(asked(*images), vision, NoMarks(), 8192)
    assert refused.value.body()["error"]["code"] == "invalid_image"


def test_an_image_that_exceeds_free_memory_is_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images_module, "memory_room", lambda: MemoryRoom(2**30, 2**20))
    with pytest.raises(UnavailableError, match="MiB are free; send smaller ones"):
        prepare_images(asked(claiming(1000, 1000)), GEMMA, NoMarks(), 4096)


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def test_metadata_of_a_png_is_not_decompressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bomb = zlib.compress(bytes(2**20))
    data = png()
    stuffed = data[:33] + chunk(b"iCCP", b"p\0\0" + bomb)
    for number in range(60):
        stuffed += chunk(b"zTXt", b"a%d\0\0" % number + bomb)
    stuffed += data[33:]

    def decompress(*arguments: Any) -> bytes:
        raise AssertionError("decompressed")

    monkeypatch.setattr(PngImagePlugin, "_safe_zlib_decompress", decompress)
    assert decode(stuffed, "x").tobytes() == decode(data, "x").tobytes()


def test_a_png_of_endless_chunks_is_refused() -> None:
    data = png()
    with pytest.raises(InvalidRequestError, match="too many pieces"):
        decode(data[:33] + chunk(b"zzZz", b"") * 70_000 + data[33:], "x")


def test_the_largest_frame_of_a_gif_is_counted() -> None:
    data = bytearray(animation("GIF")[:-1])
    place = data.index(b"\x2c")
    data[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(InvalidRequestError, match="more than 16000000 pixels"):
        size_of(bytes(data), "here")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
def test_decoding_in_strips_equals_decoding_the_whole_image(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (31, 17, 4), np.uint8)
    image = Image.fromarray(pixels, "RGBA").convert("P" if mode == "PA" else mode)
    if mode.startswith("P"):
        image.info["transparency"] = bytes(range(256)) if mode == "PA" else 3
    file = io.BytesIO()
    image.save(file, "PNG", **({"transparency": image.info["transparency"]} if "P" in mode else {}))
    opened = Image.open(io.BytesIO(file.getvalue())).convert("RGBA")
    white = Image.new("RGBA", opened.size, (255, 255, 255, 255))
    whole = Image.alpha_composite(white, opened).convert("RGB")
    monkeypatch.setattr(images_module, "STRIP_PIXELS", 40)
    assert decode(file.getvalue(), "x").tobytes() == whole.tobytes()


def held(num_bytes: int) -> tuple[ImageInput, ...]:
    return (ImageInput(0, 1, 1, num_bytes // 3, bytes(num_bytes)),)


def test_held_image_pixels_are_bounded_in_total_and_per_tenant() -> None:
    images = HeldImages(max_bytes=100)
    images.take("1", "a", held(30))
    with pytest.raises(RateLimitError, match="no room for more"):
        images.take("2", "a", held(30))
    images.take("3", "b", held(45))
    with pytest.raises(RateLimitError):
        images.take("4", "c", held(30))
    images.release("1")
    images.release("1")
    images.take("5", "c", held(30))


def test_the_engine_bounds_pixels_and_embeddings_of_all_requests_before_admission() -> None:
    store = ImageStore(None, max_held_bytes=1000, embed_bytes=50)
    account = ImageAccount(store)
    request = GenerateRequest(
        request_id="1", prompt=(1, 2), params=SamplingParams(), images=held(300), tenant="a"
    )
    assert account.needed(request.images) == 350
    assert account.find_fault(request, []) is None
    assert isinstance(account.find_fault(request, [("a", 200)]), RateLimitError)
    assert account.find_fault(request, [("b", 600)]) is None
    assert isinstance(account.find_fault(request, [("b", 700)]), RateLimitError)
    continued = msgspec.structs.replace(request, resumed=())
    assert account.find_fault(continued, [("b", 700)]) is None
    large = msgspec.structs.replace(request, images=held(480))
    assert isinstance(account.find_fault(large, []), InvalidRequestError)


async def test_images_fetched_from_urls_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [RemoteImage("https://a.b/c", f"images[{i}]") for i in range(33)]
    with pytest.raises(InvalidRequestError, match="32 addresses"):
        await with_loaded_images(({"images": many},), ["*"])

    async def download(image: Any, url: Any, address: Any, max_bytes: int) -> bytes:
        allowed.append(max_bytes)
        return bytes(max_bytes)

    allowed: list[int] = []
    monkeypatch.setattr(remote_images, "_download", download)
    monkeypatch.setattr(remote_images, "_resolved", lambda *given: asyncio.sleep(0))
    await with_loaded_images(({"images": many[:4]}, {"content": ""}), ["*"])
    assert sum(allowed) == remote_images.MAX_ALL_BYTES
