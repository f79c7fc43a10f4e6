"""Parses the images of a request: base64 data, `data:` URLs, and addresses on the web.

The content of a message with images has `IMAGE_MARK` at the place of each image. The images
themselves are in the message's field `images`, in the same order.
"""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from engine.core.interfaces.backend import IMAGE_MARK
from engine.servers.http.errors import describe, problem

MAX_IMAGES = 64  # of one message
MAX_URL = 2_048
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")

_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.ASCII)
_DETAILS = (None, "auto", "low", "high", "original")  # all images are read in full


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image on the web. `where` is its place in the request."""

    url: str
    where: str


Image = bytes | RemoteImage


class Content:
    """Collects the texts and images of a message's content."""

    def __init__(self) -> None:
        self._items: list[str | Image] = []
        self._num_images = 0

    def add_text(self, text: str) -> None:
        self._items.append(text)

    def add_image(self, image: Image, where: str) -> None:
        if self._num_images >= MAX_IMAGES:
            raise problem(where, f"a message should have at most {MAX_IMAGES} images")
        self._num_images += 1
        self._items.append(image)

    @property
    def fields(self) -> dict[str, Any]:
        """The field `content` of the message and, if there are images, the field `images`. Texts
        that follow each other are joined by newlines.
        """
        images = [each for each in self._items if not isinstance(each, str)]
        if not images:
            return {"content": "\n".join(map(str, self._items))}
        content, follows_text = "", False
        for item in self._items:
            is_text = isinstance(item, str)
            if isinstance(item, str):
                content += ("\n" if follows_text else "") + without_marks(item)
            else:
                content += IMAGE_MARK
            follows_text = is_text
        return {"content": content, "images": images}


def without_marks(text: str) -> str:
    """The text, in which the character that marks an image is replaced."""
    return text.replace(IMAGE_MARK, "\ufffd")


def image_from_url(url: Any, where: str) -> Image:
    if not isinstance(url, str):
        raise problem(where, f"should be a URL, got {describe(url)}")
    if url.startswith("data:"):
        match = _DATA_URL.match(url)
        if match is None:
            raise problem(where, "should be written data:image/png;base64,...")
        return image_from_base64(url[match.end() :], match.group(1), where)
    if not url.startswith(("http://", "https://")) or len(url) > MAX_URL:
        rule = "should be a data: URL, or an http or https URL of at most"
        raise problem(where, f"{rule} {MAX_URL} characters")
    return RemoteImage(url, where)


def image_from_base64(data: Any, media_type: Any, where: str) -> bytes:
    if not isinstance(media_type, str) or media_type not in MEDIA_TYPES:
        rule = f"should be one of {', '.join(MEDIA_TYPES)}; got {describe(media_type)}"
        raise problem(where, f"the media type {rule}")
    if not isinstance(data, str) or not data:
        raise problem(where, f"should have base64 data, got {describe(data)}")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise problem(where, "the data is not valid base64") from None


def check_detail(value: Any, where: str) -> None:
    if value not in _DETAILS:
        raise problem(where, f"should be auto, low or high, got {describe(value)}")
