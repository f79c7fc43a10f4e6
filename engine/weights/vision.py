"""Finds the image encoder of a model: in the files of a Hugging Face checkpoint, or in the file
beside a GGUF model. Reads its settings and tensors, and the settings of the image preprocessing.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.architectures.base import ModelConfig, Reader
from engine.architectures.vision import VisionConfig
from engine.architectures.vision.files import (
    MMPROJ_FAMILIES,
    PREFIXES,
    vision_from_mmproj,
)
from engine.core.store.checkpoint_files import mmproj_beside
from engine.weights.files import read_json
from engine.weights.gguf import GgufCheckpoint, open_gguf
from engine.weights.lazy_tensor import Checkpoint, LazyTensor

log = logging.getLogger(__name__)

PREPROCESSOR_NAME = "preprocessor_config.json"
PROCESSOR_NAME = "processor_config.json"
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}


def processor_config(directory: Path) -> Mapping[str, Any]:
    """The settings of the image preprocessing. Newer checkpoints have them in a part of the
    processor's config. Empty if the checkpoint has no such file, so defaults apply.
    """
    if (directory / PREPROCESSOR_NAME).exists():
        return read_json(directory, PREPROCESSOR_NAME)
    if (directory / PROCESSOR_NAME).exists():
        part = read_json(directory, PROCESSOR_NAME).get("image_processor", {})
        return Reader({"image_processor": part}, PROCESSOR_NAME).read(dict, "image_processor")
    return {}


def parted(checkpoint: Checkpoint) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """The tensors of the text model and of the image encoder. Those of the text model get the names
    that they have in checkpoints of text models, and those of the encoder the names of
    `vision_tensors`.
    """
    text: dict[str, LazyTensor] = {}
    image: dict[str, LazyTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        bare = name.removeprefix("model.")
        theirs = next((each for each in PREFIXES if bare.startswith(each)), None)
        if theirs is not None:
            name = PREFIXES[theirs] + bare.removeprefix(theirs)
            image[name] = replace(tensor, name=name)
            continue
        for prefix, ours in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
                break
        text[name] = replace(tensor, name=name)
    return text, image


def read_mmproj(
    path: Path, config: ModelConfig, metadata: Mapping[str, Any], use_mmap: bool
) -> tuple[VisionConfig | None, GgufCheckpoint | None]:
    """The image encoder in the file beside a GGUF model. Two times None if there is no such file,
    or if the file belongs to another model or has an encoder that is not supported. Then the log
    says so, and the model reads only text.
    """
    file = mmproj_beside(path)
    if file is None:
        return None, None
    encoder = open_gguf(file, use_mmap)
    reader = Reader(encoder.metadata, file.name)
    projector = reader.read(str, "clip.projector_type", default="")
    size = reader.read(int, "clip.vision.projection_dim", default=config.hidden_size)
    if MMPROJ_FAMILIES.get(projector) != config.family or size != config.hidden_size:
        log.warning(
            "%s is not used: its image encoder (%s, for embeddings of %d numbers) does not belong "
            "to this model, or is not supported",
            file.name,
            projector or "of no known type",
            size,
        )
        encoder.close()
        return None, None
    tokens: list[str] = Reader(metadata, path.name).read(list, "tokenizer.ggml.tokens")
    stated = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in encoder.metadata.items()
    }
    return vision_from_mmproj(stated, tokens, config.hidden_size), encoder
