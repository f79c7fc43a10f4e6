"""Reads parts of a config that several families share: activations, token ids, head sizes and
sliding windows.

If a config asks for something that the engine does not implement, an error names the key.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from engine.architectures.base import MAX_LAYERS, Reader
from engine.core.errors import ModelFormatError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
ANY: Any = object()
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def known_activation(name: str) -> Activation:
    """The engine's name of an activation, by its name in config.json."""
    return _ACTIVATIONS[name]


def hf_activation(reader: Reader, key: str, default: str) -> Activation:
    name = reader.read(str, key, default=default)
    if name not in _ACTIVATIONS:
        raise ModelFormatError(
            f"config.json: key '{key}': activation '{name}' is not supported "
            f"(supported: {', '.join(_ACTIVATIONS)})"
        )
    return _ACTIVATIONS[name]


def refuse_unsupported_hf(config: Mapping[str, Any], has_experts: bool) -> None:
    """Rejects Hugging Face checkpoints that are mixtures of experts, unless the family has them.
    They store other weights than the engine would look for.
    """
    for key in _EXPERT_KEYS:
        if config.get(key) and not has_experts:
            raise ModelFormatError(
                f"config.json: key '{key}': mixtures of experts are not supported in this family"
            )


def refuse_unsupported_gguf(metadata: Mapping[str, Any], has_experts: bool) -> None:
    key = f"{metadata.get('general.architecture')}.expert_count"
    if not has_experts and Reader(metadata, "GGUF metadata").read(int, key, default=0):
        raise ModelFormatError(
            f"GGUF metadata: key '{key}': mixtures of experts are not supported in this family"
        )


def refuse_values(config: Mapping[str, Any], refused: Mapping[str, Any]) -> None:
    """Raises `ModelFormatError` if a key has the value that `refused` lists for it. `ANY` stands
    for every value but null and false.
    """
    for key, value in refused.items():
        found = config.get(key)
        if found is value or (value is ANY and found not in (None, False)):
            raise ModelFormatError(f"config.json: key '{key}': {found} is not supported")


def check_sizes(found: Mapping[str, Any]) -> None:
    """Checks the sizes that functions of a family compute with, before `check_config` checks all
    fields of the finished config.
    """
    for name in ("hidden_size", "num_heads", "head_dim"):
        if found[name] < 1:
            raise ModelFormatError(f"model hyperparameters break the rule {name} >= 1")
    if not 1 <= found["num_layers"] <= MAX_LAYERS:
        raise ModelFormatError(
            f"model hyperparameters break the rule 1 <= num_layers <= {MAX_LAYERS}"
        )


def has_images(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an image encoder beside the text model."""
    return "vision_config" in config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text model of a config.json, which may also describe an image encoder."""
    if not has_images(config) or "text_config" not in config:
        return config  # the settings of the text model may also be at the top
    text = Reader(config, "config.json").read(dict, "text_config")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    return {**text, **ids}


def heads_split(hidden_size: int, num_heads: int) -> int:
    """The head size of a model whose config does not state one: hidden size / number of heads."""
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelFormatError(
            f"the number of heads ({num_heads}) must divide the hidden size ({hidden_size})"
        )
    return hidden_size // num_heads


def hf_eos_ids(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    stated = config.get("eos_token_id")
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(token_id) is int for token_id in listed):
        raise ModelFormatError("config.json: key 'eos_token_id' must be an int or a list of ints")
    return tuple(dict.fromkeys(_within(vocab_size, listed)))


def hf_bos_id(config: Mapping[str, Any], vocab_size: int) -> int | None:
    return _optional_id(Reader(config, "config.json"), "bos_token_id", vocab_size)


def gguf_eos_ids(metadata: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The token ids that end an answer: end of text, and end of turn if the tokenizer has one."""
    reader = Reader(metadata, "GGUF metadata")
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    stated = [_optional_id(reader, key, vocab_size) for key in keys]
    return tuple(dict.fromkeys(token_id for token_id in stated if token_id is not None))


def gguf_bos_id(metadata: Mapping[str, Any], vocab_size: int) -> int | None:
    reader = Reader(metadata, "GGUF metadata")
    return _optional_id(reader, "tokenizer.ggml.bos_token_id", vocab_size)


def gguf_vocab_size(metadata: Mapping[str, Any]) -> int:
    key = f"{metadata.get('general.architecture')}.vocab_size"
    tokens = metadata.get("tokenizer.ggml.tokens")
    default = {"default": len(tokens)} if isinstance(tokens, list) else {}
    return Reader(metadata, "GGUF metadata").read(int, key, **default)


def _optional_id(reader: Reader, key: str, vocab_size: int) -> int | None:
    token_id = reader.read(int, key, default=None)
    return next(_within(vocab_size, [] if token_id is None else [token_id]), None)


def _within(vocab_size: int, token_ids: list[int]) -> Iterator[int]:
    """Drops token ids beyond the vocabulary, because the model can never produce them."""
    return (token_id for token_id in token_ids if 0 <= token_id < vocab_size)
