"""Images and their place in the prompt, against the processors of Transformers."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from PIL import Image
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from engine.core.interfaces.backend import IMAGE_MARK, ChatRequest, GenerationContext
from engine.core.interfaces.request import SamplingParams
from engine.frontend.prompts import prepare_chat
from engine.frontend.text_model import TextModel, load_text
from tests.parity import tiny_vision

SIDE = tiny_vision.SIDE
# Width and height: wide and tall ones, one that needs no tiles, and one that is a line.
SIZES = [(70, 50), (33, 90), (32, 32), (160, 1), (20, 11)]


def picture(width: int, height: int, mode: str = "RGB", kind: str = "PNG") -> bytes:
    """Colours that change slowly, so that filters and tiles differ by much."""
    x, y = np.meshgrid(np.linspace(0, 9, width), np.linspace(0, 7, height))
    waves = np.stack([np.sin(x + y), np.cos(x * y / 5), np.sin(x - y), np.cos(y)], axis=-1)
    pixels = ((waves + 1) * 127).astype(np.uint8)
    image = Image.fromarray(pixels, "RGBA") if mode == "RGBA" else Image.fromarray(pixels[..., :3])
    file = io.BytesIO()
    image.convert(mode).save(file, kind)
    return file.getvalue()


class QwenProcessor:
    """Qwen2_5_VLProcessor without its part for videos, which needs torchvision."""

    image_token = "<|image_pad|>"

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, text: str, images: list[list[Any]], return_tensors: str) -> dict[str, Any]:
        values = self.image_processor(images[0], return_tensors=return_tensors)
        first, *others = text.split(self.image_token)
        for index, after in enumerate(others):
            shown = hf.Qwen2_5_VLProcessor.replace_image_token(self, values, index)
            first += shown + after
        return {**values, **self.tokenizer([first], return_tensors=return_tensors)}


def processor(name: str, path: Path) -> Any:
    names = ("image_token", "boi_token", "eoi_token")
    tokens = dict(zip(names, tiny_vision.CONTROL[name][:3], strict=True))
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), extra_special_tokens=tokens
    )
    tokenizer.chat_template = tiny_vision.TEMPLATES[name]
    if name == "gemma3":
        own = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
        return hf.Gemma3Processor(own, tokenizer, image_seq_length=tiny_vision.NUM_TOKENS)
    if name == "qwen2_5_vl":
        own = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=40 * 40, max_pixels=56 * 56)
        return QwenProcessor(own, tokenizer)
    size = {"longest_edge": SIDE}
    own = SmolVLMImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size=size)
    return hf.Idefics3Processor(own, tokenizer, image_seq_len=tiny_vision.NUM_TOKENS)


@pytest.fixture(scope="module", params=tiny_vision.TEMPLATES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextModel, Any]:
    _, path = tiny_vision.servable(request.param, tmp_path_factory.mktemp("images"))
    theirs = processor(request.param, path)
    theirs.image_processor.save_pretrained(path)
    return load_text(path), theirs


def prepared(text: TextModel, *messages: dict[str, Any]) -> Any:
    context = GenerationContext(request_id="r", params=SamplingParams())
    return prepare_chat(text, ChatRequest(context=context, messages=messages))


def pixels_of(images: Any) -> list[list[Any]]:
    """Height, width and pixels of each image."""
    return [[each.height, each.width, each.pixels] for each in images]


def their_pixels(values: Any) -> list[list[Any]]:
    """The pixels before the processor normalized them and cut them into patches."""
    if "image_grid_thw" in values:
        return _unpatched(values)
    images = (values["pixel_values"].reshape(-1, 3, SIDE, SIDE) * 0.5 + 0.5) * 255
    return [[SIDE, SIDE, _bytes(each)] for each in images]


def _unpatched(values: Any) -> list[list[Any]]:
    mean, std = np.array(OPENAI_CLIP_MEAN), np.array(OPENAI_CLIP_STD)
    found, start = [], 0
    for _, rows, columns in values["image_grid_thw"].tolist():
        patches = values["pixel_values"][start : start + rows * columns]
        start += rows * columns
        # Squares of 2 x 2 patches of 4 x 4 pixels, each patch twice
        patches = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)
        assert np.array_equal(patches[..., 0, :, :], patches[..., 1, :, :])
        image = patches[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)
        image = image.reshape(3, rows * 4, columns * 4)
        image = (image * std[:, None, None] + mean[:, None, None]) * 255
        found.append([rows * 4, columns * 4, _bytes(image)])
    return found


def _bytes(image: np.ndarray) -> bytes:
    """(3, height, width), 0 to 255"""
    return np.round(image).astype(np.uint8).transpose(1, 2, 0).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_image_tiles_and_tokens_equal_the_transformers_processor(
    both: Any, size: tuple[int, int]
) -> None:
    text, processor = both
    one, two = picture(*size), picture(40, 60)
    ours = prepared(
        text,
        {"role": "user", "content": f"Look: {IMAGE_MARK} and\n{IMAGE_MARK}", "images": [one, two]},
        {"role": "assistant", "content": f"a {IMAGE_MARK} of a client"},
        {"role": "user", "content": "and?"},
    )
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image"},
        {"type": "text", "text": " and\n"},
        {"type": "image"},
    ]
    spoken = [{"type": "text", "text": "a \ufffd of a client"}]
    rendered = processor.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": spoken},
            {"role": "user", "content": [{"type": "text", "text": "and?"}]},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    images = [Image.open(io.BytesIO(each)) for each in (one, two)]
    theirs = processor(text=rendered, images=[images], return_tensors="np")
    assert list(ours.token_ids) == theirs["input_ids"][0].tolist()
    assert pixels_of(ours.images) == their_pixels(theirs)
    # Each tile is at a run of its tokens.
    for image in ours.images:
        run = ours.token_ids[image.start : image.start + image.count]
        assert set(run) == {text.config.vision.image_token_id}


@pytest.mark.parametrize(
    "mode,kind", [("RGBA", "PNG"), ("P", "GIF"), ("L", "PNG"), ("CMYK", "JPEG")]
)
def test_image_modes_are_converted_like_the_transformers_processor(
    both: Any, mode: str, kind: str
) -> None:
    text, processor = both
    data = picture(SIDE, SIDE, mode, kind)
    ours = prepared(text, {"role": "user", "content": IMAGE_MARK, "images": [data]})
    theirs = processor.image_processor([Image.open(io.BytesIO(data))], return_tensors="np")
    assert pixels_of(ours.images) == their_pixels(theirs)
