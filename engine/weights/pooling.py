"""Reads what a model was trained for from the small files beside its weights: a sentence encoder's
pooling settings and prompts, or how a decoder embeds and ranks texts.

`modules.json` lists the modules of the encoder, each with a folder of settings. It names Python
classes, which are never imported. If the engine does not implement a module, an error names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.architectures.base import EncoderConfig, ModelConfig, Reader
from engine.architectures.checks import check_config
from engine.core.errors import ModelFormatError
from engine.weights.files import parse_json, read_json, read_small

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
    return check_config(replace(config, encoder=encoder))


@dataclass(frozen=True, slots=True)
class InputPrompts:
    """Texts that are put before an input, by name. The default is used if no name is given."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""


def read_prompts(directory: Path) -> InputPrompts:
    if not (directory / PROMPTS_NAME).exists():
        return InputPrompts()
    reader = Reader(read_json(directory, PROMPTS_NAME), PROMPTS_NAME)
    found: dict[str, Any] = reader.read(dict, "prompts", default={})
    if not all(isinstance(text, str) for text in found.values()):
        raise ModelFormatError(f"{PROMPTS_NAME}: key 'prompts' must have texts")
    name = reader.read(str, "default_prompt_name", default=None)
    if name is not None and name not in found:
        raise ModelFormatError(f"{PROMPTS_NAME}: key 'default_prompt_name': no prompt '{name}'")
    return InputPrompts(found, found[name] if name is not None else "")


@dataclass(frozen=True, slots=True)
class DecoderTask:
    """What a decoder was trained for, if not for generating text. An embedding is the hidden state
    of the last token. A reranker's score is the probability of one of two tokens.
    """

    kind: Literal["embeddings", "rerank"]
    # Only for rerankers, if the files state them: the ids of the tokens for yes and no.
    answer_ids: tuple[int, int] | None = None


def decoder_task(directory: Path, config: ModelConfig) -> DecoderTask | None:
    """None: the decoder generates text. Qwen3's rerankers have no file that tells them from other
    models, so their name counts.
    """
    if not (directory / MODULES_NAME).exists():
        is_ranker = config.family == "qwen3" and "reranker" in directory.name.lower()
        return DecoderTask("rerank") if is_ranker else None
    steps, kinds = _modules(directory)
    if kinds == ("Transformer", "LogitScore"):
        reader = Reader(read_json(directory, "config.json", steps[1].read(str, "path")), kinds[1])
        ids = reader.read(int, "true_token_id"), reader.read(int, "false_token_id")
        if not all(0 <= token < config.vocab_size for token in ids):
            raise ModelFormatError(f"{kinds[1]}: token ids {ids} are outside the vocabulary")
        return DecoderTask("rerank", ids)
    settings = _pooling_settings(directory, steps, kinds, config.hidden_size)
    if (pooling := _pooling(settings)) != "last":
        raise ModelFormatError(
            f"Pooling: '{pooling}' is not supported for decoders (supported: lasttoken)"
        )
    return DecoderTask("embeddings")


def _modules(directory: Path) -> tuple[list[Reader], tuple[str, ...]]:
    """The modules of an encoder, and their kinds."""
    text = read_small(directory, MODULES_NAME)
    modules = parse_json(b'{"modules": %s}' % text, MODULES_NAME)["modules"]
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelFormatError(f"{MODULES_NAME}: must be a list of objects")
    steps = [Reader(each, MODULES_NAME) for each in modules]
    return steps, tuple(step.read(str, "type").rpartition(".")[2] for step in steps)


def _read_modules(directory: Path, encoder: EncoderConfig, hidden_size: int) -> EncoderConfig:
    steps, kinds = _modules(directory)
    settings = _pooling_settings(directory, steps, kinds, hidden_size)
    return replace(encoder, pooling=_pooling(settings), normalizes="Normalize" in kinds)


def _pooling_settings(
    directory: Path, steps: list[Reader], kinds: tuple[str, ...], hidden_size: int
) -> dict[str, Any]:
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
    if settings.get("include_prompt") is False:
        raise ModelFormatError("Pooling: key 'include_prompt': false is not supported")
    return settings


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
