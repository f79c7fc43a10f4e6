"""Decodes the images of a request and scales them to the size that the model reads.

The results equal those of the model's own processor in Transformers. An image becomes one or more
tiles. In the prompt, the token that the chat template writes for an image is replaced by the tokens
of its tiles and by the markers between them.

Images come from clients, so only common formats are decoded, and the size is checked before the
pixels are. Pillow is imported with the first image.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import IMAGE_MARK
from engine.core.interfaces.request import ImageInput
from engine.core.text.tokenizer import RenderedPrompt, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from engine.backends.custom.architectures.vision import VisionConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 16_000_000
MAX_ASPECT = 200  # of images for Qwen2.5-VL
MAX_RGB_BYTES = 48 * 2**20  # all images of a request, after scaling


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of an image, at the size that the encoder reads."""

    height: int
    width: int
    count: int  # number of its tokens
    pixels: bytes


@dataclass(frozen=True, slots=True)
class PreparedImage:
    tiles: tuple[Tile, ...]
    segments: tuple[str | int, ...]  # texts and control tokens that stand for it in the prompt


def prepare_images(
    messages: Sequence[Mapping[str, Any]], vision: "VisionConfig | None", tokenizer: Tokenizer
) -> tuple[PreparedImage, ...]:
    """Decode all images of a conversation, in the order of their marks in the texts."""
    found: list[PreparedImage] = []
    for index, message in enumerate(messages):
        images = message.get("images", ())
        if not images:
            continue
        param = f"messages[{index}].content"
        if vision is None:
            raise InvalidRequestError(f"{param}: this model does not read images.", param=param)
        if message["content"].count(IMAGE_MARK) != len(images):
            raise InvalidRequestError(
                f"{param}: the text must have one mark (U+FFFC) for each image.", param=param
            )
        found += [prepare_image(data, vision, tokenizer, param) for data in images]
    return tuple(found)


def without_marks(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without their images. In texts of messages that have no images, the mark of an
    image is only a character of the client, so it is replaced.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        kept = {key: value for key, value in message.items() if key != "images"}
        if "images" not in message:
            kept["content"] = (kept.get("content") or "").replace(IMAGE_MARK, "\ufffd")
        plain.append(kept)
    return plain


def as_parts(content: str) -> list[dict[str, str]]:
    """The content of a message as a list of parts, in the form that chat templates take."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE_MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts or [{"type": "text", "text": ""}]


def prepare_image(
    data: bytes, vision: "VisionConfig", tokenizer: Tokenizer, param: str
) -> PreparedImage:
    """Decode an image file. `param` names the image in errors."""
    image = decode(data, param)
    if vision.kind == "idefics3":
        return _idefics3(image, vision, tokenizer)
    if vision.kind == "qwen2_5_vl":
        return _qwen(image, vision, param)
    return _gemma3(image, vision)


def decode(data: bytes, param: str) -> "Image":
    """Decode an image file to RGB."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    def refused(rule: str) -> InvalidRequestError:
        return InvalidRequestError(f"{param}: {rule}.", param=param, code="invalid_image")

    too_large = f"the image has more than {MAX_PIXELS} pixels"
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise refused(too_large)
        # A photo of the format MPO has several versions of the same picture. The first is used.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise refused("the image is animated; send a single frame")
        image.load()
        return _on_white(ImageOps.exif_transpose(image))
    except InvalidRequestError:
        raise
    except Image.DecompressionBombError:  # raised if there are even many more
        raise refused(too_large) from None
    except UnidentifiedImageError:
        raise refused(f"the data is not an image of type {', '.join(FORMATS)}") from None
    except Exception:  # Pillow raises many kinds of errors for damaged files
        raise refused("the image can't be decoded; it is damaged or cut off") from None


def _on_white(image: "Image") -> "Image":
    """Convert to RGB. Transparent pixels become white."""
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _tile(image: "Image", count: int) -> Tile:
    return Tile(image.height, image.width, count, image.tobytes())


def _gemma3(image: "Image", vision: "VisionConfig") -> PreparedImage:
    size, count = vision.image_size, vision.tokens_per_side**2
    scaled = image.resize((size, size), vision.processing.resample)
    assert vision.end_id is not None
    tokens = (vision.placeholder_id, *([vision.image_token_id] * count), vision.end_id)
    return PreparedImage((_tile(scaled, count),), ("\n\n", *tokens, "\n\n"))


def _qwen(image: "Image", vision: "VisionConfig", param: str) -> PreparedImage:
    unit = vision.image_size
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise InvalidRequestError(
            f"{param}: the longer side of an image may be at most {MAX_ASPECT} times the other.",
            param=param,
            code="invalid_image",
        )
    width, height = _near(*image.size, vision)
    scaled = image.resize((width, height), vision.processing.resample)
    count = (width // unit) * (height // unit)
    return PreparedImage((_tile(scaled, count),), (vision.image_token_id,) * count)


def _near(width: int, height: int, vision: "VisionConfig") -> tuple[int, int]:
    """The multiples of the unit that are nearest to this size. If the image would have too few or
    too many pixels, it is scaled first, so that its aspect stays about the same.
    """
    unit, processing = vision.image_size, vision.processing
    sides = (width, height)
    near = [round(side / unit) * unit for side in sides]
    if near[0] * near[1] > processing.max_pixels:
        shrink = math.sqrt(width * height / processing.max_pixels)
        near = [max(unit, math.floor(side / shrink / unit) * unit) for side in sides]
    elif near[0] * near[1] < processing.min_pixels:
        grow = math.sqrt(processing.min_pixels / (width * height))
        near = [math.ceil(side * grow / unit) * unit for side in sides]
    return max(near[0], unit), max(near[1], unit)


def _idefics3(image: "Image", vision: "VisionConfig", tokenizer: Tokenizer) -> PreparedImage:
    size, resample = vision.image_size, vision.processing.resample
    count = vision.tokens_per_side**2
    image = image.resize(_first_size(*image.size, vision.processing.longest_edge), resample)
    tiles: list[Image] = []
    rows = columns = 0
    if vision.processing.splits:
        image = image.resize(_multiple(*image.size, size), resample)
        columns, rows = image.width // size, image.height // size
    if columns * rows > 1:
        corners = [(x * size, y * size) for y in range(rows) for x in range(columns)]
        tiles = [image.crop((x, y, x + size, y + size)) for x, y in corners]
    else:
        rows = columns = 0
    tiles.append(image.resize((size, size), resample))
    segments = tuple(_idefics3_segments(rows, columns, count, vision, tokenizer))
    return PreparedImage(tuple(_tile(each, count) for each in tiles), segments)


def _first_size(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size at which the longer side has `longest` pixels. The other side is rounded up to an
    even number.
    """
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height = max(height + height % 2, 1)
    else:
        width, height = int(longest * aspect), longest
        width = max(width + width % 2, 1)
    return width, height


def _multiple(width: int, height: int, size: int) -> tuple[int, int]:
    """The size rounded up to multiples of `size`. The shorter side is computed from the rounded
    longer one.
    """
    aspect = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        return width, math.ceil(int(width / aspect) / size) * size
    height = math.ceil(height / size) * size
    return math.ceil(int(height * aspect) / size) * size, height


def _idefics3_segments(
    rows: int, columns: int, count: int, vision: "VisionConfig", tokenizer: Tokenizer
) -> Iterator[str | int]:
    """The tiles row by row, each after its marker. Then the whole image in small."""

    def mark(text: str) -> str | int:
        token = tokenizer.token_id(text)
        return token if token is not None and tokenizer.is_special(token) else text

    around = mark("<fake_token_around_image>")
    tokens = [vision.image_token_id] * count
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            yield from (around, mark(f"<row_{row}_col_{column}>"), *tokens)
        yield "\n"
    if rows:
        yield "\n"
    yield from (around, mark("<global-img>"), *tokens, around)


def with_images(
    rendered: RenderedPrompt, images: Sequence[PreparedImage], vision: "VisionConfig"
) -> RenderedPrompt:
    """Replace the placeholder of each image by the tokens of the image."""
    segments: list[str | int] = []
    left = iter(images)
    for segment in rendered.segments:
        if segment != vision.placeholder_id:
            segments.append(segment)
            continue
        image = next(left, None)
        if image is None:
            raise _misplaced()
        segments += image.segments
    if next(left, None) is not None:
        raise _misplaced()
    return RenderedPrompt(tuple(segments))


def _misplaced() -> InvalidRequestError:
    return InvalidRequestError(
        "This model's chat template does not show every image once; put images only into user "
        "messages.",
        param="messages",
    )


def placed(
    token_ids: Sequence[int], images: Sequence[PreparedImage], vision: "VisionConfig"
) -> tuple[ImageInput, ...]:
    """Where the tiles of the images are in the prompt."""
    tiles = [tile for image in images for tile in image.tiles]
    inputs: list[ImageInput] = []
    position = 0
    with contextlib.suppress(ValueError):  # raised if the prompt has no further image token
        for tile in tiles:
            position = token_ids.index(vision.image_token_id, position)
            inputs.append(ImageInput(position, tile.count, tile.height, tile.width, tile.pixels))
            position += tile.count
    num_tokens = sum(tile.count for tile in tiles)
    if len(inputs) < len(tiles) or token_ids.count(vision.image_token_id) != num_tokens:
        raise _misplaced()
    if sum(len(tile.pixels) for tile in tiles) > MAX_RGB_BYTES:
        raise InvalidRequestError(
            f"The images have more than {MAX_RGB_BYTES // 2**20} MiB of pixels; send fewer.",
            param="messages",
        )
    return tuple(inputs)
