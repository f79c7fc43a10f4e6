"""Images in the engine process: their embeddings, and their part in the prefix cache's key.

The tokens of an image in a prompt are all the same. So in `Sequence.tokens` they are replaced by
numbers that are derived from the image's content. The prefix cache then compares images like any
other tokens. These numbers are below `FROM_DEVICE`, where no token id is.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np
from msgspec import structs

from engine.core.errors import (
    ConfigError,
    EngineError,
    InferenceError,
    InvalidRequestError,
    RateLimitError,
)
from engine.core.interfaces.request import GenerateRequest, ImageInput, TokenDelta
from engine.core.memory import MIB
from engine.runtime.model_runner import F32, FROM_DEVICE, I32, BatchInputs, ImageEncoder
from engine.runtime.sequence import Extension, Row, Sequence

MAX_CACHED_BYTES = 256 * 2**20
# Of requests that have not ended: pixels that wait to be encoded, and embeddings
MAX_HELD_BYTES = 512 * 2**20
TENANT_SHARE = 0.5  # of these bytes, for the requests of one tenant


class PlacedImage(msgspec.Struct, frozen=True):
    """An image in a prompt. Its tokens are at the positions start .. end - 1."""

    start: int
    embeds: F32  # (E, D)
    key: I32  # (E,) numbers that stand for the image's tokens in the key of the prefix cache
    token_id: int  # the token that each of its tokens is in the prompt
    two_way: bool  # its tokens attend to all of its tokens, so one step must compute all of them
    # The image has this many tokens per row, and RoPE rotates by rows and columns. None: RoPE
    # rotates by the position.
    columns: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.embeds)

    @property
    def rope_delta(self) -> int:
        """RoPE rotates the tokens after the image as if they were this much later. The image counts
        only as many positions as its longer side has tokens.
        """
        if self.columns is None:
            return 0
        return max(self.columns, len(self.embeds) // self.columns) - len(self.embeds)


def rope_positions(images: Iterable[PlacedImage], start: int, length: int) -> I32:
    """The positions by which RoPE rotates `length` tokens from `start` on, (3, length)."""
    rotated = np.arange(start, start + length, dtype=np.int32)[None].repeat(3, axis=0)
    for image in images:
        rotated[:, max(image.end - start, 0) :] += image.rope_delta
        first, last = max(start, image.start), min(start + length, image.end)
        if image.columns is not None and first < last:
            inside = np.arange(first, last, dtype=np.int32) - image.start
            # All tokens of the image follow the text before the image. `rotated` already has what
            # earlier images add.
            base = rotated[0, first - start] - inside[0]
            offsets = (np.zeros_like(inside), inside // image.columns, inside % image.columns)
            rotated[:, first - start : last - start] = base + np.stack(offsets)
    return rotated


def image_digest(image: ImageInput) -> bytes:
    """The SHA-256 of everything that the image's embeddings depend on."""
    digest = hashlib.sha256(f"{image.height},{image.width},{image.count};".encode())
    digest.update(image.pixels)
    return digest.digest()


def key_of(digest: bytes, count: int) -> I32:
    """Numbers that are derived from the image's digest, one for each of its `count` tokens. They
    are from -2**31 to -2.
    """
    drawn: I32 = np.frombuffer(hashlib.shake_256(digest).digest(4 * count), np.int32)
    negative: I32 = np.minimum(drawn | np.int32(-(2**31)), FROM_DEVICE - 1)
    return negative


def fault_in(images: Iterable[ImageInput], num_prompt: int) -> str | None:
    """What is wrong with the images of a request, or None. A prompt may not end with an image."""
    end = 0
    for image in images:
        if len(image.pixels) != image.height * image.width * 3 or not image.pixels:
            return "An image does not have as many pixels as its size says."
        if image.count < 1 or not end <= image.start < image.start + image.count < num_prompt:
            return "Images must be in order, and text must follow the last image."
        end = image.start + image.count
    return None


def placed_tokens(prompt: "array[int]", images: Iterable[PlacedImage]) -> "array[int]":
    """The prompt, in which the tokens of images are replaced by the images' keys."""
    tokens = prompt[:]
    for image in images:
        tokens[image.start : image.end] = array("i", image.key.tobytes())
    return tokens


def whole_images(images: Iterable[PlacedImage], start: int, count: int, room: int) -> int:
    """How many tokens a row from `start` on may have, if it must not end inside an image. The
    result is at most `count`, except for a row that starts with an image. Such a row has the whole
    image, or no tokens if the image is longer than `room`.
    """
    end = start + count
    for image in images:
        if image.two_way and image.start < end < image.end:
            whole = image.end - start
            if image.start > start:
                return image.start - start
            return whole if whole <= room else 0
    return count


class PromptImages(Extension):
    """The images in the prompts of sequences that have not ended."""

    drafts = "lookup"  # the draft model reads no images

    def __init__(self) -> None:
        self._of: dict[Sequence, tuple[PlacedImage, ...]] = {}

    def put(self, seq: Sequence, images: tuple[PlacedImage, ...]) -> None:
        self._of[seq] = images

    def ended(self, seq: Sequence) -> None:
        self._of.pop(seq, None)

    def bytes_held(self) -> Iterable[tuple[str, int]]:
        """The tenant and the bytes of each request. Its choices share their images."""
        requests = {seq.request_id: (seq.tenant, images) for seq, images in self._of.items()}
        return [(tenant, held_bytes(images)) for tenant, images in requests.values()]

    def complete(self, seq: Sequence, delta: TokenDelta, is_first: bool, now: float) -> TokenDelta:
        if delta.timeline is None or seq not in self._of:
            return delta
        timeline = structs.replace(delta.timeline, num_images=len(self._of[seq]))
        return structs.replace(delta, timeline=timeline)

    def row_length(self, seq: Sequence, start: int, count: int, room: int) -> int:
        return whole_images(self._of[seq], start, count, room)

    def known_ids(self, seq: Sequence, ids: list[int]) -> list[int]:
        images = self._of.get(seq)
        image_token = images[0].token_id if images else 0  # 0: the sequence has ended
        return [image_token if token < 0 else token for token in ids]

    def add_inputs(self, inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
        """Add the embeddings of the images that the rows contain."""
        embeds: list[F32] = []
        places: list[I32] = []
        ends = inputs.positions + 1
        for row, first in zip(rows, inputs.query_start.tolist(), strict=False):
            for image in self._of.get(row.seq, ()):
                start, end = max(row.start, image.start), min(row.start + row.length, image.end)
                if start < end:
                    place = np.arange(start, end, dtype=np.int32) + (first - row.start)
                    places.append(place)
                    embeds.append(image.embeds[start - image.start : end - image.start])
                    if image.two_way:
                        ends[place] = image.end
        inputs = replace(inputs, rope_positions=self._rope_positions(rows))
        if not embeds:
            return inputs
        return replace(
            inputs,
            token_ids=np.where(inputs.token_ids < FROM_DEVICE, 0, inputs.token_ids),
            embeds=np.concatenate(embeds),
            embed_rows=np.concatenate(places),
            visible_end=None if np.array_equal(ends, inputs.positions + 1) else ends,
        )

    def _rope_positions(self, rows: tuple[Row, ...]) -> I32 | None:
        found = [self._of.get(row.seq, ()) for row in rows]
        if all(image.columns is None for images in found for image in images):
            return None
        rotated = [
            rope_positions(images, row.start, row.length)
            for images, row in zip(found, rows, strict=True)
        ]
        return np.concatenate(rotated, axis=1)


class ImageStore:
    """Encodes images, and keeps the embeddings of the images that were used last."""

    def __init__(
        self,
        encoder: ImageEncoder,
        *,
        two_way_tokens: int = 0,
        grid_unit: int | None = None,
        max_bytes: int = MAX_CACHED_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
        embed_bytes: int = 0,
    ) -> None:
        """For `two_way_tokens` and `grid_unit`, see `VisionConfig`. An embedding has `embed_bytes`
        bytes.
        """
        self._encoder = encoder
        self.two_way_tokens = two_way_tokens
        self._grid_unit = grid_unit
        self._max_bytes = max_bytes
        self.max_held_bytes = max_held_bytes
        self.embed_bytes = embed_bytes
        self._embeds: OrderedDict[bytes, F32] = OrderedDict()  # by digest; oldest use first
        self._num_bytes = 0
        self.num_encoded = 0

    def place(self, image: ImageInput, token_id: int) -> PlacedImage:
        digest = image_digest(image)
        embeds = self._embeds.get(digest)
        if embeds is None:
            pixels = np.frombuffer(image.pixels, np.uint8)
            embeds = self._encoder.encode(pixels.reshape(image.height, image.width, 3))
            self.num_encoded += 1
            if len(embeds) != image.count:
                raise InferenceError(
                    f"An image has {image.count} tokens, but the model made {len(embeds)}."
                )
            self._keep(digest, embeds)
        self._embeds.move_to_end(digest)
        key = key_of(digest, image.count)
        columns = None if self._grid_unit is None else image.width // self._grid_unit
        return PlacedImage(image.start, embeds, key, token_id, self.two_way_tokens > 0, columns)

    def _keep(self, digest: bytes, embeds: F32) -> None:
        """Keep embeddings. The ones that were not used for the longest time make room for them."""
        self._embeds[digest] = embeds
        self._num_bytes += embeds.nbytes
        while self._num_bytes > self._max_bytes and len(self._embeds) > 1:
            _, oldest = self._embeds.popitem(last=False)
            self._num_bytes -= oldest.nbytes


class ImageAccount:
    """Counts the memory of images of requests that have not ended. A request is counted before
    anything is allocated for it.
    """

    def __init__(self, images: ImageStore) -> None:
        self._max_bytes, self._embed_bytes = images.max_held_bytes, images.embed_bytes

    def needed(self, images: Iterable[ImageInput]) -> int:
        return sum(len(image.pixels) + self._embed_bytes * image.count for image in images)

    def find_fault(
        self, request: GenerateRequest, held: Iterable[tuple[str, int]]
    ) -> EngineError | None:
        """An error if there is no room for the images of a request. `held` has the tenant and the
        bytes of each request with images. A request that continues had room before.
        """
        needed = self.needed(request.images)
        most = int(TENANT_SHARE * self._max_bytes)
        if needed > most:
            return InvalidRequestError(
                f"The images need {needed / MIB:,.0f} MiB in the engine, and a request may use "
                f"{most / MIB:,.0f} MiB; send fewer or smaller ones."
            )
        if request.resumed is not None:
            return None
        counted = list(held)
        whole = sum(num_bytes for _, num_bytes in counted)
        own = sum(num_bytes for tenant, num_bytes in counted if tenant == request.tenant)
        if whole + needed > self._max_bytes or own + needed > most:
            return RateLimitError(
                "Too many images are waiting or in use; try again later.", retry_after=None
            )
        return None


def held_bytes(images: Iterable[PlacedImage]) -> int:
    return sum(image.embeds.nbytes for image in images)


def check_image_rows(max_row: int, images: ImageStore) -> None:
    """Raise if one step can't compute a whole image, although the model needs it. `max_row` is the
    max number of tokens of a sequence in a step in which all other sequences decode.
    """
    if images.two_way_tokens > max_row:
        raise ConfigError(
            f"this model computes the {images.two_way_tokens} tokens of an image in one step, "
            f"which has room for {max_row}; raise max_batch_tokens, lower batch_size, or raise "
            "memory_pool_size_mb"
        )
