"""Settings of image encoders, and of how images are prepared for them.

An image encoder is a vision transformer with a connector, which turns the patches of an image into
embeddings for the text model. `VisionConfig.kind` names the connector and the preprocessing.
"""

from dataclasses import dataclass
from typing import Literal

from engine.core.errors import ModelFormatError

VisionKind = Literal["idefics3", "gemma3", "qwen2_5_vl"]
MAX_IMAGE_SIZE = 4096
MAX_VISION_LAYERS = 1024
VISION_THETA = 10_000.0  # the base of RoPE in image encoders


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """How pixels are prepared for the encoder."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rescale: float = 1 / 255  # multiplies the pixels, before `mean` is subtracted
    resample: int = 2  # the number of a Pillow filter: 1 is Lanczos, 2 bilinear, 3 bicubic
    # Only for "idefics3": the longer side of the image is scaled to this many pixels. Then the
    # image is split into tiles of `VisionConfig.image_size` pixels.
    longest_edge: int = 0
    splits: bool = False
    # Only for "qwen2_5_vl": images are scaled to a number of pixels between these two.
    min_pixels: int = 0
    max_pixels: int = 0


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Settings of an image encoder. Images have three channels."""

    kind: VisionKind
    image_token_id: int  # the token that stands for one embedding of an image in the prompt
    # The token that a chat template writes for a whole image. It is replaced by markers and image
    # tokens.
    placeholder_id: int
    end_id: int | None  # the token after the image tokens, if the kind has one
    # Width and height of the encoder's input, in pixels. Only for "qwen2_5_vl": the encoder takes
    # inputs whose width and height are multiples of this.
    image_size: int
    patch_size: int  # width and height of a patch, in pixels
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    norm_eps: float
    merge: int  # the connector makes one embedding of merge * merge patches
    output_size: int  # the size of the text model's embeddings
    processing: ImageProcessing
    # Only for "qwen2_5_vl": a patch attends to the patches of its square of this many pixels. In
    # the layers `full_layers`, it attends to all patches.
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    frames_per_patch: int = 1  # a patch is this many copies of a part of the image

    @property
    def tokens_per_side(self) -> int:
        """The number of image tokens per row and per column of an image of `image_size`."""
        return self.image_size // self.patch_size // self.merge

    @property
    def grid_unit(self) -> int | None:
        """How many pixels wide and high the part of an image is that one token stands for, if RoPE
        rotates by the token's row and column in the image. None: it rotates by the position only.
        """
        return self.image_size if self.kind == "qwen2_5_vl" else None

    @property
    def two_way_tokens(self) -> int:
        """The number of an image's tokens, if they attend to all tokens of the image, also to later
        ones. 0 if they attend only to earlier ones, like text.
        """
        return self.tokens_per_side**2 if self.kind == "gemma3" else 0


def check_vision(config: VisionConfig, vocab_size: int) -> VisionConfig:
    """Returns the config. Raises `ModelFormatError` if settings are out of range or contradict each
    other.
    """
    processing, merge = config.processing, config.merge
    ids = (config.image_token_id, config.placeholder_id, config.end_id or 0)
    per_side = config.image_size // max(1, config.patch_size)
    rules = {
        f"1 <= image_size <= {MAX_IMAGE_SIZE}": 1 <= config.image_size <= MAX_IMAGE_SIZE,
        "1 <= patch_size <= image_size": 1 <= config.patch_size <= config.image_size,
        "merge divides the patches per side": 1 <= merge <= per_side and per_side % merge == 0,
        "hidden_size >= 1": config.hidden_size >= 1,
        "num_heads divides hidden_size": config.num_heads >= 1
        and config.hidden_size % config.num_heads == 0,
        f"1 <= num_layers <= {MAX_VISION_LAYERS}": 1 <= config.num_layers <= MAX_VISION_LAYERS,
        "intermediate_size >= 1": config.intermediate_size >= 1,
        "0 < norm_eps < 1": 0 < config.norm_eps < 1,
        "image tokens within the vocabulary": all(0 <= each < vocab_size for each in ids),
        "std > 0": all(each > 0 for each in processing.std),
        "resample is a Pillow filter": 0 <= processing.resample <= 5,
        "window_size >= image_size": config.kind != "qwen2_5_vl"
        or config.window_size >= config.image_size,
        "1 <= frames per patch <= 16": 1 <= config.frames_per_patch <= 16,
        "min_pixels <= max_pixels": 0 <= processing.min_pixels <= processing.max_pixels,
        "head size is a multiple of 4": config.kind != "qwen2_5_vl"
        or config.hidden_size % (4 * max(1, config.num_heads)) == 0,
        f"0 <= longest_edge <= {MAX_IMAGE_SIZE}": 0 <= processing.longest_edge <= MAX_IMAGE_SIZE,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ModelFormatError(f"image encoder settings break the rule {rule}: {config}")
    return config
