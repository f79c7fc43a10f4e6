"""Decides which files of a folder or repository belong to a checkpoint: weights, configuration and
tokenizer.

Sentence encoders also have module settings in folders such as `1_Pooling`.
"""

import re
from pathlib import Path

MMPROJ_PREFIX = "mmproj"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
_COMPANIONS = frozenset(
    (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "tekken.json",
        "tiktoken.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "preprocessor_config.json",
        "processor_config.json",
    )
)
_RANKS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}\.tiktoken")
_STEP = re.compile(r"[0-9]_[A-Za-z]{1,40}/config\.json")
_WEIGHTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


def is_companion(name: str) -> bool:
    """Whether a file belongs to a checkpoint, but is not a weight file. `name` is relative to the
    checkpoint's folder.
    """
    return name in _COMPANIONS or any(form.fullmatch(name) for form in (_RANKS, _STEP))


def is_weights(name: str) -> bool:
    return _WEIGHTS.fullmatch(name) is not None


def is_mmproj(name: str) -> bool:
    """Whether a GGUF file's name says that it has an image encoder, and no text model."""
    return name.startswith(MMPROJ_PREFIX) and name.endswith(".gguf")


def mmproj_beside(model: Path) -> Path | None:
    """The file with the image encoder of a GGUF model: the only such file in the model's folder. If
    there are several, it is not clear which belongs to the model, and the result is None.
    """
    if model.suffix != ".gguf" or is_mmproj(model.name) or not model.parent.is_dir():
        return None
    found = [entry for entry in model.parent.iterdir() if is_mmproj(entry.name)]
    return found[0] if len(found) == 1 else None
