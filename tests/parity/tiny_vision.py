"""Tiny Hugging Face models that read images, with random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
import transformers as hf
from numpy.typing import NDArray
from tokenizers import processors
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.core.interfaces.request import ImageInput
from tests.parity import tiny_models
from tests.support.files.tokenizer_files import write_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE, BEGIN, END = 90, 91, 92  # tokens
SIDE = 32  # pixels per side of an image
NUM_TOKENS = 4  # tokens of an image
COMMON = tiny_models.COMMON | {"max_position_embeddings": 1024}
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


@dataclass(frozen=True)
class Ids:
    """The tokens of images, and the number of all tokens."""

    image: int = IMAGE
    begin: int = BEGIN
    end: int = END
    vocab: int = COMMON["vocab_size"]


def _idefics3(kind: str, ids: Ids) -> "PreTrainedModel":
    text = COMMON | {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": ids.vocab}
    config = getattr(hf, f"{kind}Config")(
        text_config=text,
        vision_config=VISION,
        scale_factor=2,
        image_token_id=ids.image,
        tie_word_embeddings=False,
    )
    return getattr(hf, f"{kind}ForConditionalGeneration")(config)


def _gemma3(ids: Ids) -> "PreTrainedModel":
    config = hf.Gemma3Config(
        text_config=COMMON
        | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "vocab_size": ids.vocab}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"tie_word_embeddings": False},
        vision_config=VISION,
        mm_tokens_per_image=NUM_TOKENS,
        image_token_index=ids.image,
        boi_token_index=ids.begin,
        eoi_token_index=ids.end,
        tie_word_embeddings=False,
    )
    return hf.Gemma3ForConditionalGeneration(config)


def _qwen(ids: Ids) -> "PreTrainedModel":
    config = hf.Qwen2_5_VLConfig(
        text_config=COMMON
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": ids.vocab}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
        | {"max_window_layers": 3, "tie_word_embeddings": False},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": COMMON["hidden_size"],
            "initializer_range": 0.2,
        },
        image_token_id=ids.image,
        tie_word_embeddings=False,
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config)


MODELS: "dict[str, Callable[[Ids], PreTrainedModel]]" = {
    "smolvlm": lambda ids: _idefics3("SmolVLM", ids),
    "idefics3": lambda ids: _idefics3("Idefics3", ids),
    "gemma3": _gemma3,
    "qwen2_5_vl": _qwen,
}
# Chat templates in the manner of the families' own. SmolVLM's takes only lists of parts.
_PARTS = (
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'PLACE' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
)
_TEXT_OR_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    + _PARTS
    + "{% endif %}"
)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' }}CONTENT"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEMPLATES = {
    "smolvlm": _TEMPLATE.replace("CONTENT", _PARTS).replace("PLACE", "<image>"),
    "gemma3": _TEMPLATE.replace("CONTENT", _TEXT_OR_PARTS).replace("PLACE", "<start_of_image>"),
    "qwen2_5_vl": _TEMPLATE.replace("CONTENT", _TEXT_OR_PARTS).replace(
        "PLACE", "<|vision_start|><|image_pad|><|vision_end|>"
    ),
}
# Control tokens of each family: that of an image, then others.
CONTROL = {
    "smolvlm": (
        *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
}


def servable(name: str, folder: Path) -> "tuple[PreTrainedModel, Path]":
    """A model with a tokenizer and a chat template."""
    path = write_directory(folder / name, chat_template=TEMPLATES[name])
    engine = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    engine.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in CONTROL[name]])
    engine.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    engine.save(str(path / "tokenizer.json"))
    own = [engine.token_to_id(text) for text in CONTROL[name][:3]]
    return save(name, folder, Ids(*own, engine.get_vocab_size()))


def save(name: str, folder: Path, ids: Ids | None = None) -> "tuple[PreTrainedModel, Path]":
    torch.manual_seed(0)
    model = MODELS[name](ids or Ids()).eval()
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


def picture(seed: int, height: int = SIDE, width: int = SIDE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def prompt(
    *parts: "list[int] | Pixels", unit: int | None = None
) -> tuple[list[int], list[ImageInput]]:
    """The token ids of texts and pictures, and where the pictures are. If `unit` is given, a
    picture has one token for each square of this many pixels.
    """
    ids: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        ids.append(BEGIN)
        height, width, _ = part.shape
        count = NUM_TOKENS if unit is None else (height // unit) * (width // unit)
        images.append(ImageInput(len(ids), count, height, width, part.tobytes()))
        ids += [IMAGE] * count + [END]
    return ids, images


def arguments(model: "PreTrainedModel", ids: list[int], images: Sequence[ImageInput]) -> Any:
    """The inputs of a Transformers model."""
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    if not images:
        return given
    is_image = (given["input_ids"] == IMAGE).long()
    pixels = [np.frombuffer(e.pixels, np.uint8).reshape(e.height, e.width, 3) for e in images]
    if model.config.model_type == "qwen2_5_vl":
        own = Qwen2VLImageProcessorPil(
            patch_size=4, size={"shortest_edge": 64, "longest_edge": 10**6}
        )
        return given | own(pixels, return_tensors="pt") | {"mm_token_type_ids": is_image}
    stacked = np.stack(pixels).transpose(0, 3, 1, 2)
    values = torch.tensor((stacked / 255 - 0.5) / 0.5, dtype=torch.float32)
    if model.config.model_type == "gemma3":
        return given | {"pixel_values": values, "token_type_ids": is_image}
    return given | {"pixel_values": values[None]}
