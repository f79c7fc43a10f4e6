"""BERT: a post-norm text encoder with learned positions and token types.

A checkpoint may have the weights of a pooler. Sentence encoders do not use these weights. Instead,
settings files next to the weights say how token states are pooled (`weights/pooling.py`).
"""

from engine.backends.custom.architectures.base import EncoderConfig, Reader
from engine.backends.custom.architectures.family import Family, Settings, WeightRow
from engine.core.errors import ModelFormatError

_L, _HF = "layers.{i}", "bert.encoder.layer.{i}"


def _row(name: str, shape: str, hf: str, bias: str | None = None) -> WeightRow:
    return WeightRow(f"{name}.weight", shape, f"{hf}.weight", gguf=None, bias=bias)


def _encoder(reader: Reader, found: Settings) -> Settings:
    positions = reader.read(str, "position_embedding_type", default="absolute")
    if positions != "absolute":
        raise ModelFormatError(
            f"config.json: key 'position_embedding_type': '{positions}' is not supported"
        )
    num_types = reader.read(int, "type_vocab_size", default=2)
    encoder = EncoderConfig(num_token_types=num_types, max_tokens=found["max_position"])
    return {"encoder": encoder, "bos_id": None, "eos_ids": ()}  # encoders generate no tokens


BERT = Family(
    name="bert",
    hf_names=("BertModel",),
    gguf_names=("bert",),
    weights=(
        _row("embed", "VD", "bert.embeddings.word_embeddings"),
        _row("position", "PD", "bert.embeddings.position_embeddings"),
        _row("token_type", "YD", "bert.embeddings.token_type_embeddings"),
        _row("embed_norm", "D", "bert.embeddings.LayerNorm", "norm_bias"),
        _row(f"{_L}.attn.q", "qD", f"{_HF}.attention.self.query", "qkv_bias"),
        _row(f"{_L}.attn.k", "kD", f"{_HF}.attention.self.key", "qkv_bias"),
        _row(f"{_L}.attn.v", "kD", f"{_HF}.attention.self.value", "qkv_bias"),
        _row(f"{_L}.attn.o", "Dq", f"{_HF}.attention.output.dense", "out_bias"),
        _row(f"{_L}.mlp.up", "FD", f"{_HF}.intermediate.dense", "mlp_bias"),
        _row(f"{_L}.mlp.down", "DF", f"{_HF}.output.dense", "mlp_bias"),
        _row(f"{_L}.attn_norm", "D", f"{_HF}.attention.output.LayerNorm", "norm_bias"),
        _row(f"{_L}.mlp_norm", "D", f"{_HF}.output.LayerNorm", "norm_bias"),
    ),
    hf_keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position",
        "layer_norm_eps": "norm_eps",
    },
    gguf_keys=None,
    hf_activation=("hidden_act", "gelu"),
    always={
        "tie_embeddings": True,  # a checkpoint has no weights of an LM head
        "rope": None,
        "norm": "layer",
        "norm_bias": True,
        "norm_placement": "sum",
        "gated_mlp": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    defaults={"norm_eps": 1e-12},
    hf_refused={"is_decoder": True, "add_cross_attention": True},
    hf_more=_encoder,
)
