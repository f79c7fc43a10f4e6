"""Gemma 1 to 3, text models: embeddings are multiplied by the root of the hidden size, and Hugging
Face stores norm weights minus one. Gemma 2 and 3 normalize inputs and outputs of attention and MLP,
and most or half of their layers have a window.
"""

from math import sqrt

from engine.architectures.base import Reader
from engine.architectures.common import (
    ATTENTION_BIAS,
    GATED_MLP,
    GGUF_KEYS,
    HF_KEYS,
    Rows,
    attention,
    decoder,
    head_norms,
    input_norms,
    norm,
)
from engine.architectures.family import Family, More, Settings
from engine.architectures.foreign import ANY, text_config
from engine.architectures.layers import alternating
from engine.core.errors import ModelFormatError

_ADDED = 1.0
_NORMS: Rows = (
    norm("attn_norm", "input_layernorm", "attn_norm", _ADDED),
    norm("attn_out_norm", "post_attention_layernorm", "post_attention_norm", _ADDED),
    norm("mlp_norm", "pre_feedforward_layernorm", "ffn_norm", _ADDED),
    norm("mlp_out_norm", "post_feedforward_layernorm", "post_ffw_norm", _ADDED),
)
_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")


def _scaled(reader: Reader, found: Settings) -> Settings:
    return {"embedding_multiplier": sqrt(found["hidden_size"])}


def _attention_scale(found: Settings, scalar: float) -> Settings:
    """Attention scores are divided by the root of `scalar`, which is usually the head size."""
    return {"attention_multiplier": None if scalar == found["head_dim"] else scalar**-0.5}


def _from_hf(layers: More) -> More:
    def read(reader: Reader, found: Settings) -> Settings:
        scalar = reader.read(float, "query_pre_attn_scalar", default=256.0)
        if scalar <= 0:
            raise ModelFormatError("config.json: key 'query_pre_attn_scalar' must be above 0")
        scale = _attention_scale(found, scalar)
        return {**_scaled(reader, found), **scale, **layers(reader, found)}

    return read


def _from_gguf(layers: More, num_layers_27b: int) -> More:
    """GGUF files do not state the scale of attention scores. Only the largest model, which is known
    by its number of layers, divides by another number than the root of the head size.
    """

    def read(reader: Reader, found: Settings) -> Settings:
        scalar: float = found["head_dim"]
        if found["num_layers"] == num_layers_27b:
            scalar = found["hidden_size"] / found["num_heads"]
        scale = _attention_scale(found, scalar)
        return {**_scaled(reader, found), **scale, **layers(reader, found)}

    return read


GEMMA = Family(
    name="gemma",
    hf_names=("GemmaForCausalLM",),
    gguf_names=("gemma",),
    weights=decoder(attention(), GATED_MLP, input_norms(_ADDED), added=_ADDED),
    hf_keys=HF_KEYS | ATTENTION_BIAS,
    gguf_keys=GGUF_KEYS,
    hf_activation=_ACTIVATION,
    hf_defaults={"tie_embeddings": True, "head_dim": 256},
    hf_refused={"use_bidirectional_attention": ANY},
    hf_more=_scaled,
    gguf_more=_scaled,
)
_GEMMA2_LAYERS = alternating(2, window=4096)
# Gemma 2's caps of attention scores and logits, if a file lacks the keys. Null means no cap.
_CAPS = {
    "attn_logit_softcapping": ("attention_softcap", 50.0),
    "final_logit_softcapping": ("logits_softcap", 30.0),
}


def _capped(more: More, prefix: str = "") -> More:
    def read(reader: Reader, found: Settings) -> Settings:
        missing = {
            field: cap for key, (field, cap) in _CAPS.items() if not reader.has(f"{prefix}{key}")
        }
        return {**more(reader, found), **missing}

    return read


GEMMA2 = Family(
    name="gemma2",
    hf_names=("Gemma2ForCausalLM",),
    gguf_names=("gemma2",),
    weights=decoder(attention(), GATED_MLP, _NORMS, added=_ADDED),
    hf_keys=HF_KEYS
    | ATTENTION_BIAS
    | {
        "attn_logit_softcapping": "attention_softcap",
        "final_logit_softcapping": "logits_softcap",
    },
    gguf_keys=GGUF_KEYS
    | {
        "attn_logit_softcapping": "attention_softcap",
        "final_logit_softcapping": "logits_softcap",
    },
    hf_activation=_ACTIVATION,
    always={"norm_placement": "both"},
    hf_defaults={"tie_embeddings": True, "head_dim": 256},
    hf_refused={"use_bidirectional_attention": ANY},
    hf_more=_capped(_from_hf(_GEMMA2_LAYERS[0])),
    gguf_more=_capped(_from_gguf(_GEMMA2_LAYERS[1], num_layers_27b=46), "gemma2."),
)
_GEMMA3_LAYERS = alternating(6, window=4096, local_theta=10_000.0, plain_local=True)
GEMMA3 = Family(
    name="gemma3",
    hf_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_names=("gemma3",),
    weights=decoder(attention(), GATED_MLP, _NORMS, head_norms("H", "H", _ADDED), added=_ADDED),
    hf_keys=HF_KEYS | ATTENTION_BIAS | {"final_logit_softcapping": "logits_softcap"},
    gguf_keys=GGUF_KEYS | {"final_logit_softcapping": "logits_softcap"},
    hf_activation=_ACTIVATION,
    always={"norm_placement": "both", "qk_norm": "head"},
    # Files of models with image encoders omit the settings that equal Transformers' defaults.
    hf_defaults={
        "tie_embeddings": True,
        "vocab_size": 262_208,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "max_position": 131_072,
        "norm_eps": 1e-6,
    },
    hf_refused={"use_bidirectional_attention": ANY, "attn_logit_softcapping": ANY},
    hf_more=_from_hf(_GEMMA3_LAYERS[0]),
    gguf_more=_from_gguf(_GEMMA3_LAYERS[1], num_layers_27b=62),
    theta=1_000_000.0,
    has_local_rope=True,
    hf_view=text_config,
    hf_kind=lambda config: ("Gemma3ForCausalLM", "gemma3_text"),
)
