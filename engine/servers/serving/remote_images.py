"""Fetches images from the web for requests that give addresses.

This is off by default. A request could otherwise make the server connect to addresses that only the
server can reach. Hosts must be listed in `server.image_hosts`. A host's name is resolved once, all
its addresses must be public, and the connection goes to one of these addresses. Redirects are not
followed.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Any

import httpx

from engine.core.errors import InvalidRequestError
from engine.servers.schema.images import RemoteImage

MAX_BYTES = 20 * 2**20
MAX_ALL_BYTES = 64 * 2**20  # of all images of a request
MAX_IMAGES = 32  # of a request
TIMEOUT_S = 10.0
ALL_TIMEOUT_S = 60.0
ANY_HOST = "*"
# The name of a host, or an IPv4 or IPv6 address, and a port. Neither user names nor other
# characters may come before the path, so that no two parsers can disagree on the host.
_URL = re.compile(
    r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-\[\]-~]*)?", re.ASCII
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


async def with_loaded_images(
    messages: tuple[dict[str, Any], ...], hosts: Sequence[str]
) -> tuple[dict[str, Any], ...]:
    """The messages, with the content of each image instead of its address. Images are counted
    before they are fetched, and their bytes while they are.
    """
    remote = [
        each
        for message in messages
        for each in message.get("images", ())
        if isinstance(each, RemoteImage)
    ]
    if len(remote) > MAX_IMAGES:
        raise _refused(remote[-1], f"a request may have {MAX_IMAGES} addresses of images")
    fetched, left = {}, MAX_ALL_BYTES
    try:
        async with asyncio.timeout(ALL_TIMEOUT_S):
            for each in remote:
                fetched[each] = await fetch_image(each, hosts, left)
                left -= len(fetched[each])
    except TimeoutError:
        rule = f"the images did not arrive within {ALL_TIMEOUT_S:.0f} seconds"
        raise _refused(remote[len(fetched)], rule) from None
    return tuple(_with_fetched(message, fetched) for message in messages)


def _with_fetched(message: dict[str, Any], fetched: dict[RemoteImage, bytes]) -> dict[str, Any]:
    if "images" not in message:
        return message
    images = [
        fetched[each] if isinstance(each, RemoteImage) else each for each in message["images"]
    ]
    return {**message, "images": images}


async def fetch_image(
    image: RemoteImage, hosts: Sequence[str], max_all: int = MAX_ALL_BYTES
) -> bytes:
    if not hosts:
        raise _refused(
            image, "this server fetches no images; send the image as a data: URL (base64)"
        )
    if _URL.fullmatch(image.url) is None:
        raise _refused(image, "the URL must have a host, maybe a port, and a path")
    try:
        url = httpx.URL(image.url)
    except httpx.InvalidURL:
        raise _refused(image, "the URL is not valid") from None
    if ANY_HOST not in hosts and url.host.lower() not in hosts:
        raise _refused(image, "the server may not fetch images from this host")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            address = await _resolved(image, url)
            return await _download(image, url, address, min(MAX_BYTES, max_all))
    except TimeoutError:
        raise _refused(image, f"the image did not arrive within {TIMEOUT_S:.0f} seconds") from None
    except (httpx.HTTPError, OSError):
        raise _refused(image, "the image could not be fetched") from None


def _refused(image: RemoteImage, rule: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{image.where}: {rule}.", param=image.where, code="invalid_image_url"
    )


async def _resolved(image: RemoteImage, url: httpx.URL) -> Address:
    """An address of the host. All addresses of the host must be public."""
    loop = asyncio.get_running_loop()
    port = url.port or (443 if url.scheme == "https" else 80)
    found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(each[4][0]) for each in found]
    if not addresses or not all(map(is_public, addresses)):
        raise _refused(image, "the host has an address that is not public")
    return addresses[0]


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet. An IPv6 address that contains an IPv4
    address is not public: it could stand for an address inside the network.
    """
    if isinstance(address, ipaddress.IPv6Address):
        embeds = address.ipv4_mapped or address.sixtofour or address.teredo
        if embeds is not None or address in _NAT64 or address in _COMPATIBLE:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/32")
_COMPATIBLE = ipaddress.ip_network("::/96")


async def _download(image: RemoteImage, url: httpx.URL, address: Address, max_bytes: int) -> bytes:
    headers = {"host": url.netloc.decode("ascii"), "accept": "image/*"}
    headers["accept-encoding"] = "identity"
    # The certificate must be that of the host's name, not of its address.
    extensions = {"sni_hostname": url.host}
    async with (
        httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=TIMEOUT_S) as client,
        client.stream(
            "GET", url.copy_with(host=str(address)), headers=headers, extensions=extensions
        ) as response,
    ):
        if response.status_code != 200 or "content-encoding" in response.headers:
            raise _refused(image, f"the host answered with status {response.status_code}")
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > max_bytes:
                limit = f"{MAX_BYTES // 2**20} MiB, or all have more than {MAX_ALL_BYTES // 2**20}"
                raise _refused(image, f"the image has more than {limit} MiB")
        return bytes(data)
