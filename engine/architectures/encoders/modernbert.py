"""ModernBERT: a pre-norm text encoder, most of whose layers attend to a window around each token.

The first layer's attention has no norm before it, since the embeddings are normalized already.
"""

from collections.abc import Mapping
from typing import Any

from engine.architectures.base import (
    EncoderConfig,
    ModelConfig,
    Reader,
    ScoreHead,
)
from engine.architectures.encoders.bert import (
    CLASSIFIER,
    HF_KEYS,
    check_labels,
    is_classifier,
    row,
    score_rows,
    squashes,
)
from engine.architectures.family import Family, Settings
from engine.architectures.foreign import hf_activation
from engine.architectures.layers import alternating
from engine.architectures.weight_rows import Stored, WeightRow
from engine.core.errors import ModelFormatError


def _after_first(config: ModelConfig, layer: int) -> bool:
    return layer > 0


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_MODERN_THETA = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
_MODERN_LAYERS = alternating(3, local_theta=_MODERN_THETA[_LOCAL][1])


def _modern_view(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Older files state the period of global layers and one key per RoPE base."""
    reader = Reader(config, "config.json")
    view = dict(config)
    # A token attends to half of the window before it, to itself, and to half of it after it.
    view["sliding_window"] = reader.read(int, "local_attention", default=128) // 2 + 1
    if config.get("layer_types") is None:
        period = max(1, reader.read(int, "global_attn_every_n_layers", default=3))
        count = min(reader.read(int, "num_hidden_layers"), 1024)
        view["layer_types"] = [_LOCAL if index % period else _GLOBAL for index in range(count)]
    if config.get("rope_parameters") is None:
        view["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": reader.read(float, key, default=theta)}
            for kind, (key, theta) in _MODERN_THETA.items()
        }
    return view


def _modern(reader: Reader, found: Settings) -> Settings:
    head, pooling = None, "mean"
    if is_classifier(reader.source):
        check_labels(reader.source)
        head = ScoreHead(
            hf_activation(reader, "classifier_activation", "gelu"),
            bias=reader.read(bool, "classifier_bias", default=False),
            norm=True,
            squashes=squashes(reader.source),
        )
        pooling = reader.read(str, "classifier_pooling", default="cls")
        if pooling not in ("cls", "mean"):
            raise ModelFormatError(
                f"config.json: key 'classifier_pooling': '{pooling}' is not supported"
            )
    encoder = EncoderConfig(
        num_token_types=0,
        max_tokens=found["max_position"],
        pooling="mean" if pooling == "mean" else "cls",
        normalizes=head is None,
        head=head,
    )
    layers = _MODERN_LAYERS[0](reader, found)
    return {**layers, "encoder": encoder, "bos_id": None, "eos_ids": ()}


_MODERN_HF = "model.layers.{i}"


def _modern_part(name: str, shape: str, hf: str, parts: str, index: int) -> WeightRow:
    """A weight that shares a stored matrix with others."""
    stored = Stored(parts=parts, index=index)
    gguf = "attn_qkv" if parts == "qkk" else "ffn_up"
    bias = "qkv_bias" if parts == "qkk" else "mlp_bias"
    names = (f"layers.{{i}}.{name}", shape, f"{_MODERN_HF}.{hf}", f"blk.{{i}}.{gguf}")
    return row(*names, bias, None, stored, stored)


MODERN_BERT = Family(
    name="modernbert",
    hf_names=("ModernBertModel", f"ModernBert{CLASSIFIER}"),
    gguf_names=(),
    weights=(
        row("embed", "VD", "model.embeddings.tok_embeddings", "token_embd"),
        row("embed_norm", "D", "model.embeddings.norm", "token_embd_norm"),
        row(
            "layers.{i}.attn_norm",
            "D",
            f"{_MODERN_HF}.attn_norm",
            "blk.{i}.attn_norm",
            when=_after_first,
        ),
        _modern_part("attn.q", "qD", "attn.Wqkv", "qkk", 0),
        _modern_part("attn.k", "kD", "attn.Wqkv", "qkk", 1),
        _modern_part("attn.v", "kD", "attn.Wqkv", "qkk", 2),
        row("layers.{i}.attn.o", "Dq", f"{_MODERN_HF}.attn.Wo", "blk.{i}.attn_output", "out_bias"),
        row("layers.{i}.mlp_norm", "D", f"{_MODERN_HF}.mlp_norm", "blk.{i}.ffn_norm"),
        _modern_part("mlp.gate", "FD", "mlp.Wi", "FF", 0),
        _modern_part("mlp.up", "FD", "mlp.Wi", "FF", 1),
        row("layers.{i}.mlp.down", "DF", f"{_MODERN_HF}.mlp.Wo", "blk.{i}.ffn_down", "mlp_bias"),
        row("norm", "D", "model.final_norm", "output_norm"),
        *score_rows("head.dense", "classifier"),
    ),
    hf_keys=HF_KEYS
    | {
        "norm_eps": "norm_eps",
        "attention_bias": ("qkv_bias", "out_bias"),
        "mlp_bias": "mlp_bias",
    },
    gguf_keys=None,
    hf_activation=("hidden_activation", "gelu"),
    always={"tie_embeddings": True, "norm": "layer", "norm_placement": "input"},
    defaults={"norm_eps": 1e-5},
    theta=_MODERN_THETA[_GLOBAL][1],
    has_local_rope=True,
    hf_refused={"norm_bias": True},
    hf_view=_modern_view,
    hf_more=_modern,
)
