"""Decodes the images of a request and scales them to the size that the model reads.

The results equal those of the model's own processor in Transformers. An image becomes one or more
tiles. In the prompt, the token that the chat template writes for an image is replaced by the tokens
of its tiles and by the markers between them.

Images come from clients. So only common formats are decoded, and all sizes are counted before any
pixel is decoded: those of each image and of all images of the request, as they are in the files and
as the model reads them. Pillow is imported with the first image.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from engine.core.errors import EngineError, InvalidRequestError, UnavailableError
from engine.core.image_file import only_picture
from engine.core.interfaces.backend import IMAGE_MARK
from engine.core.interfaces.request import ImageInput
from engine.core.memory import memory_room
from engine.core.text.tokenizer import RenderedPrompt, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from engine.architectures.vision import VisionConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_IMAGES = 256  # of a request
MAX_PIXELS = 16_000_000  # of an image
MAX_SIDE = 65_535  # scaling keeps weights for each pixel of a side, which are not counted
MAX_ALL_PIXELS = 64_000_000  # of all images of a request
# Bytes per pixel while an image is decoded: the file's pixels, a copy with alpha, and the result.
DECODING_BYTES = 12
RETRY_AFTER_S = 5.0
STRIP_PIXELS = 500_000  # composed at a time, because composing holds the GIL
MAX_ASPECT = 200  # of images for Qwen2.5-VL
MAX_RGB_BYTES = 48 * 2**20  # all images of a request, after scaling


@dataclass(frozen=True, slots=True)
class ImageTile:
    """A part of an image, at the size that the encoder reads."""

    height: int
    width: int
    count: int  # number of its tokens
    pixels: bytes


@dataclass(frozen=True, slots=True)
class PreparedImage:
    tiles: tuple[ImageTile, ...]
    segments: tuple[str | int, ...]  # texts and control tokens that stand for it in the prompt


def prepare_images(
    messages: Sequence[Mapping[str, Any]],
    vision: "VisionConfig | None",
    tokenizer: Tokenizer,
    max_tokens: int,
) -> tuple[PreparedImage, ...]:
    """Decode all images of a conversation, in the order of their marks in the texts. They may have
    `max_tokens` tokens in sum.
    """
    found: list[tuple[bytes, str]] = []
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
        found += [(data, param) for data in images]
    if not found:
        return ()
    assert vision is not None
    check_sizes(found, vision, max_tokens)
    return tuple(prepare_image(data, vision, tokenizer, param) for data, param in found)


def check_sizes(
    images: Sequence[tuple[bytes, str]], vision: "VisionConfig", max_tokens: int
) -> None:
    """Refuse images that are too many or too large in sum, before any is decoded. Each comes with
    the name of its place in the request.
    """
    if len(images) > MAX_IMAGES:
        raise _refused(images[-1][1], f"a request may have at most {MAX_IMAGES} images")
    pixels = tokens = num_bytes = 0
    largest = 0
    for data, param in images:
        width, height = size_of(data, param)
        pixels += width * height
        largest = max(largest, width * height)
        sizes = tile_sizes(width, height, vision)
        num_bytes += sum(3 * width * height for width, height, _ in sizes)
        tokens += sum(count for *_, count in sizes)
        if pixels > MAX_ALL_PIXELS:
            raise _refused(param, f"the images have more than {MAX_ALL_PIXELS} pixels in sum")
        if num_bytes > MAX_RGB_BYTES:
            limit = f"{MAX_RGB_BYTES // 2**20} MiB of pixels for the model"
            raise _refused(param, f"the images have more than {limit}; send fewer")
        if tokens > max_tokens:
            raise _refused(param, f"the images have more tokens than the context ({max_tokens})")
    needed, room = DECODING_BYTES * largest + num_bytes, memory_room().plannable
    if needed > room:
        raise UnavailableError(
            f"The images need {needed // 2**20} MiB while they are decoded, and {room // 2**20} MiB"
            " are free; send smaller ones, or retry later.",
            retry_after=RETRY_AFTER_S,
        )


def tile_sizes(width: int, height: int, vision: "VisionConfig") -> list[tuple[int, int, int]]:
    """Width, height and number of tokens of each tile of an image of this size."""
    size, count = vision.image_size, vision.tokens_per_side**2
    if vision.kind == "qwen2_5_vl":
        width, height = _near(width, height, vision)
        return [(width, height, (width // size) * (height // size))]
    if vision.kind == "gemma3":
        return [(size, size, count)]
    columns, rows = _idefics3_grid(width, height, vision)
    return [(size, size, count)] * (columns * rows + 1)


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


def size_of(data: bytes, param: str) -> tuple[int, int]:
    """Width and height of an image, by its header."""
    with _opened(data, param) as image:
        return image.size


def decode(data: bytes, param: str) -> "Image":
    """Decode an image file to RGB."""
    from PIL import ImageOps

    with _opened(data, param) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _on_white(image)


@contextlib.contextmanager
def _opened(data: bytes, param: str) -> "Iterator[Image]":
    """An image file, of which only the header was read and checked. Errors of Pillow while it is
    used are errors of the request.
    """
    from PIL import Image, UnidentifiedImageError

    too_large = f"the image has more than {MAX_PIXELS} pixels"
    try:
        picture = only_picture(data)
    except ValueError as error:
        raise _refused(param, f"the file has {error}") from None
    try:
        with Image.open(BytesIO(picture), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise _refused(param, too_large)
            if max(width, height) > MAX_SIDE:
                raise _refused(param, f"a side of the image has more than {MAX_SIDE} pixels")
            if getattr(image, "is_animated", False):
                raise _refused(param, "the image is animated; send a single frame")
            yield image
    except EngineError:
        raise
    except Image.DecompressionBombError:  # raised if there are even many more
        raise _refused(param, too_large) from None
    except UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        raise _refused(param, f"the data is not an image of type {formats}") from None
    except Exception:  # Pillow raises many kinds of errors for damaged files
        rule = "the image can't be decoded; it is damaged or cut off"
        raise _refused(param, rule) from None


def _refused(param: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {rule}.", param=param, code="invalid_image")


def _on_white(image: "Image") -> "Image":
    """Convert to RGB. Transparent pixels become white. Strips are composed one after the other,
    because other threads wait meanwhile.
    """
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.copy() if image.mode == "RGB" else image.convert("RGB")
    composed = Image.new("RGB", image.size)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        composed.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return composed


def _tile(image: "Image", count: int) -> ImageTile:
    return ImageTile(image.height, image.width, count, image.tobytes())


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
    columns, rows = _idefics3_grid(*image.size, vision)
    image = image.resize(_first_size(*image.size, vision.processing.longest_edge), resample)
    tiles: list[Image] = []
    if vision.processing.splits:
        image = image.resize(_multiple(*image.size, size), resample)
    if rows:
        corners = [(x * size, y * size) for y in range(rows) for x in range(columns)]
        tiles = [image.crop((x, y, x + size, y + size)) for x, y in corners]
    tiles.append(image.resize((size, size), resample))
    segments = tuple(_idefics3_segments(rows, columns, count, vision, tokenizer))
    return PreparedImage(tuple(_tile(each, count) for each in tiles), segments)


def _idefics3_grid(width: int, height: int, vision: "VisionConfig") -> tuple[int, int]:
    """Columns and rows of the tiles that an image of this size is split into. (0, 0): it is not."""
    if not vision.processing.splits:
        return 0, 0
    width, height = _first_size(width, height, vision.processing.longest_edge)
    width, height = _multiple(width, height, vision.image_size)
    columns, rows = width // vision.image_size, height // vision.image_size
    return (columns, rows) if columns * rows > 1 else (0, 0)


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
    return tuple(inputs)
