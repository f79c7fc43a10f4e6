"""BERT: a text encoder with learned positions and token types, and norms behind each half block.

Checkpoints may carry a pooler, which sentence encoders never use: what becomes of the tokens'
states is told by files beside the weights (`weights/pooling.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.backends.custom.architectures.base import (
    EncoderConfig,
    ModelConfig,
    Reader,
    TensorSpec,
    check_config,
)
from engine.backends.custom.architectures.foreign import (
    heads_split,
    hf_activation,
    refuse_unsupported_hf,
    refuse_values,
)
from engine.core.errors import ModelFormatError

HF_NAMES = ("BertModel",)
GGUF_NAMES = ("bert",)


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported_hf(config)
    refuse_values(config, {"is_decoder": True, "add_cross_attention": True})
    reader = Reader(config, "config.json")
    positions = reader.read(str, "position_embedding_type", default="absolute")
    if positions != "absolute":
        raise ModelFormatError(
            f"config.json: key 'position_embedding_type': '{positions}' is not supported"
        )
    hidden_size = reader.read(int, "hidden_size")
    num_heads = reader.read(int, "num_attention_heads")
    max_position = reader.read(int, "max_position_embeddings")
    return check_config(
        ModelConfig(
            family="bert",
            vocab_size=reader.read(int, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=reader.read(int, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=heads_split(hidden_size, num_heads),
            intermediate_size=reader.read(int, "intermediate_size"),
            max_position=max_position,
            norm_eps=reader.read(float, "layer_norm_eps", default=1e-12),
            tie_embeddings=True,  # there is no head
            rope=None,
            norm="layer",
            activation=hf_activation(reader, "hidden_act", default="gelu"),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            encoder=EncoderConfig(
                num_token_types=reader.read(int, "type_vocab_size", default=2),
                max_tokens=max_position,
            ),
        )
    )


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    raise ModelFormatError(
        "BERT models are read from safetensors only; use the model's Hugging Face directory"
    )


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    hidden, encoder = config.hidden_size, config.encoder
    assert encoder is not None, config
    hf = "bert.embeddings"
    specs = [
        _spec("embed.weight", (config.vocab_size, hidden), f"{hf}.word_embeddings.weight"),
        _spec("position.weight", (config.max_position, hidden), f"{hf}.position_embeddings.weight"),
        _spec(
            "token_type.weight",
            (encoder.num_token_types, hidden),
            f"{hf}.token_type_embeddings.weight",
        ),
        *_pair("embed_norm", (hidden,), f"{hf}.LayerNorm"),
    ]
    for layer in range(config.num_layers):
        specs.extend(_layer_tensors(config, layer))
    return tuple(specs)


def _layer_tensors(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    ours, hf = f"layers.{layer}", f"bert.encoder.layer.{layer}"
    for name, hf_name, rows, columns in (
        ("attn.q", "attention.self.query", hidden, hidden),
        ("attn.k", "attention.self.key", hidden, hidden),
        ("attn.v", "attention.self.value", hidden, hidden),
        ("attn.o", "attention.output.dense", hidden, hidden),
        ("mlp.up", "intermediate.dense", inner, hidden),
        ("mlp.down", "output.dense", hidden, inner),
    ):
        yield from _pair(f"{ours}.{name}", (rows, columns), f"{hf}.{hf_name}")
    yield from _pair(f"{ours}.attn_norm", (hidden,), f"{hf}.attention.output.LayerNorm")
    yield from _pair(f"{ours}.mlp_norm", (hidden,), f"{hf}.output.LayerNorm")


def _pair(name: str, shape: tuple[int, ...], hf: str) -> Iterator[TensorSpec]:
    """A weight and its bias, which has one entry for each row."""
    yield _spec(f"{name}.weight", shape, f"{hf}.weight")
    yield _spec(f"{name}.bias", shape[:1], f"{hf}.bias")


def _spec(name: str, shape: tuple[int, ...], hf: str) -> TensorSpec:
    return TensorSpec(name, shape, hf, gguf=None)
