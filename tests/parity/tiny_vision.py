"""Tiny Hugging Face models that read images, with random weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray

from engine.core.interfaces.request import ImageInput
from tests.parity.tiny_models import COMMON

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE, BEGIN, END = 90, 91, 92  # tokens
SIDE = 32  # pixels per side of an image
NUM_TOKENS = 4  # tokens of an image
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
    "initializer_range": 0.2,
}
Pixels = NDArray[np.uint8]


def _idefics3(kind: str) -> "PreTrainedModel":
    text = COMMON | {"model_type": "llama", "rms_norm_eps": 1e-5}
    config = getattr(hf, f"{kind}Config")(
        text_config=text,
        vision_config=VISION,
        scale_factor=2,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return getattr(hf, f"{kind}ForConditionalGeneration")(config)


def _gemma3() -> "PreTrainedModel":
    config = hf.Gemma3Config(
        text_config=COMMON
        | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        vision_config=VISION,
        mm_tokens_per_image=NUM_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )
    return hf.Gemma3ForConditionalGeneration(config)


MODELS: "dict[str, Callable[[], PreTrainedModel]]" = {
    "smolvlm": lambda: _idefics3("SmolVLM"),
    "idefics3": lambda: _idefics3("Idefics3"),
    "gemma3": _gemma3,
}


def save(name: str, folder: Path) -> "tuple[PreTrainedModel, Path]":
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:  # norms and biases, which start as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif not parameter.any():  # Gemma's projection starts as zeros
                parameter.normal_(0, 0.2)
    path = folder / name
    model.save_pretrained(path)
    model.generation_config.eos_token_id = None  # tests compare answers of a fixed length
    return model, path


def picture(seed: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def prompt(*parts: "list[int] | Pixels") -> tuple[list[int], list[ImageInput]]:
    """The token ids of texts and pictures, and where the pictures are."""
    ids: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        ids.append(BEGIN)
        images.append(ImageInput(len(ids), NUM_TOKENS, SIDE, SIDE, part.tobytes()))
        ids += [IMAGE] * NUM_TOKENS + [END]
    return ids, images


def arguments(model: "PreTrainedModel", ids: list[int], images: Sequence[ImageInput]) -> Any:
    """The inputs of a Transformers model."""
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    if not images:
        return given
    pixels = np.stack([np.frombuffer(each.pixels, np.uint8) for each in images])
    pixels = pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2)
    values = torch.tensor((pixels / 255 - 0.5) / 0.5, dtype=torch.float32)
    if model.config.model_type == "gemma3":
        is_image = given["input_ids"] == IMAGE
        return given | {"pixel_values": values, "token_type_ids": is_image.long()}
    return given | {"pixel_values": values[None]}
