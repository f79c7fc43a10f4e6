"""Finds the image encoder in the files of a Hugging Face checkpoint. Reads its tensors, and the
settings of the image preprocessing.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.backends.custom.architectures.base import Reader
from engine.backends.custom.architectures.vision_files import PREFIXES
from engine.backends.custom.weights.files import read_json
from engine.backends.custom.weights.lazy_tensor import Checkpoint, LazyTensor

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
