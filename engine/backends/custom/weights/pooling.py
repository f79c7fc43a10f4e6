"""Reads a sentence encoder's pooling settings from the small files beside its weights.

`modules.json` lists the modules of the encoder, each with a folder of settings. It names Python
classes, which are never imported. If the engine does not implement a module, an error names it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from engine.backends.custom.architectures.base import EncoderConfig, ModelConfig, Reader
from engine.backends.custom.architectures.checks import check_config
from engine.backends.custom.weights.files import parse_json, read_json, read_small
from engine.core.errors import ModelFormatError

MODULES_NAME = "modules.json"
SENTENCE_NAME = "sentence_bert_config.json"
PROMPTS_NAME = "config_sentence_transformers.json"

Pooling = Literal["mean", "cls", "last"]
_MODES: dict[str, Pooling] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
    "lasttoken": "last",
}


def with_pooling(config: ModelConfig, directory: Path) -> ModelConfig:
    """The encoder's `config`, completed with the pooling settings in `directory`."""
    encoder = config.encoder
    assert encoder is not None, config
    if (directory / MODULES_NAME).exists():
        encoder = _read_modules(directory, encoder, config.hidden_size)
    if (directory / SENTENCE_NAME).exists():
        encoder = _read_limits(directory, encoder, config.max_position)
    if (directory / PROMPTS_NAME).exists():
        prompt = read_json(directory, PROMPTS_NAME).get("default_prompt_name")
        if prompt is not None:
            raise ModelFormatError(
                f"{PROMPTS_NAME}: key 'default_prompt_name': a prompt before every text is not "
                "supported"
            )
    return check_config(replace(config, encoder=encoder))


def _read_modules(directory: Path, encoder: EncoderConfig, hidden_size: int) -> EncoderConfig:
    text = read_small(directory, MODULES_NAME)
    modules = parse_json(b'{"modules": %s}' % text, MODULES_NAME)["modules"]
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelFormatError(f"{MODULES_NAME}: must be a list of objects")
    steps = [Reader(each, MODULES_NAME) for each in modules]
    kinds = tuple(step.read(str, "type").rpartition(".")[2] for step in steps)
    if kinds not in (("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize")):
        raise ModelFormatError(
            f"{MODULES_NAME}: the steps {', '.join(kinds) or 'none'} are not supported; an encoder "
            "here is Transformer, Pooling and maybe Normalize"
        )
    if steps[0].read(str, "path", default=""):
        raise ModelFormatError(f"{MODULES_NAME}: the Transformer must lie in the model's directory")
    settings = read_json(directory, "config.json", steps[1].read(str, "path"))
    dimensions = Reader(settings, "Pooling").read(int, "word_embedding_dimension", hidden_size)
    if dimensions != hidden_size:
        raise ModelFormatError(
            f"Pooling: key 'word_embedding_dimension' is {dimensions}, the model's hidden size "
            f"{hidden_size}"
        )
    return replace(encoder, pooling=_pooling(settings), normalizes="Normalize" in kinds)


def _pooling(settings: dict[str, Any]) -> Pooling:
    """The pooling method that a settings file states. Older files have one flag for each method.
    Newer files have the name of the method.
    """
    flag = "pooling_mode_"
    wanted = [key.removeprefix(flag) for key, on in settings.items() if key.startswith(flag) and on]
    if "pooling_mode" in settings:
        wanted.append(str(settings["pooling_mode"]))
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise ModelFormatError(
            f"Pooling: {' with '.join(wanted) or 'no way of pooling'} is not supported (supported: "
            f"one of {', '.join(_MODES)})"
        )
    return _MODES[wanted[0]]


def _read_limits(directory: Path, encoder: EncoderConfig, max_position: int) -> EncoderConfig:
    reader = Reader(read_json(directory, SENTENCE_NAME), SENTENCE_NAME)
    if reader.read(bool, "do_lower_case", default=False):
        raise ModelFormatError(
            f"{SENTENCE_NAME}: key 'do_lower_case': the tokenizer decides on case here"
        )
    limit = reader.read(int, "max_seq_length", default=encoder.max_tokens)
    return replace(encoder, max_tokens=min(limit, max_position))
