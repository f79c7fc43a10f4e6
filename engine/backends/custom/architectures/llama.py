"""Llama and its descendants. All of these families have RMS norms, RoPE and a gated MLP. Each
`Family` below states where it differs from Llama.
"""

from engine.backends.custom.architectures.base import Reader
from engine.backends.custom.architectures.family import (
    PAIRED,
    PLAIN,
    REQUIRED,
    Family,
    Keys,
    Settings,
    Stored,
    WeightRow,
    has_head,
)
from engine.backends.custom.architectures.foreign import uniform_window
from engine.core.errors import ModelFormatError

_HF_KEYS: Keys = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_ATTENTION_BIAS: Keys = {"attention_bias": ("qkv_bias", "out_bias")}
_MLP_BIAS: Keys = {"mlp_bias": "mlp_bias"}
_GGUF_KEYS: Keys = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position",
    "attention.layer_norm_rms_epsilon": "norm_eps",
}


def _row(
    name: str,
    shape: str,
    hf: str,
    gguf: str,
    bias: str | None = None,
    gguf_stored: Stored = PLAIN,
) -> WeightRow:
    """A weight that every layer has. `name`, `hf` and `gguf` lack the layer's prefix and the suffix
    ".weight", which this function adds.
    """
    return WeightRow(
        f"layers.{{i}}.{name}.weight",
        shape,
        f"model.layers.{{i}}.{hf}.weight",
        f"blk.{{i}}.{gguf}.weight",
        bias,
        gguf_stored=gguf_stored,
    )


def _weights(
    norms: tuple[WeightRow, ...], heads: tuple[WeightRow, ...] = (), interleaved: bool = False
) -> tuple[WeightRow, ...]:
    """The weights of a family. `norms` are the two norms of a layer. `heads` are the norms of
    queries and keys. `interleaved` means that in GGUF files, the two rows of each RoPE pair of q
    and k are next to each other.
    """
    rotated = PAIRED if interleaved else PLAIN
    rows = (
        WeightRow("embed.weight", "VD", "model.embed_tokens.weight", "token_embd.weight"),
        _row("attn.q", "qD", "self_attn.q_proj", "attn_q", "qkv_bias", rotated),
        _row("attn.k", "kD", "self_attn.k_proj", "attn_k", "qkv_bias", rotated),
        _row("attn.v", "kD", "self_attn.v_proj", "attn_v", "qkv_bias"),
        _row("attn.o", "Dq", "self_attn.o_proj", "attn_output", "out_bias"),
        _row("mlp.gate", "FD", "mlp.gate_proj", "ffn_gate", "mlp_bias"),
        _row("mlp.up", "FD", "mlp.up_proj", "ffn_up", "mlp_bias"),
        _row("mlp.down", "DF", "mlp.down_proj", "ffn_down", "mlp_bias"),
        *norms,
        *heads,
        WeightRow("norm.weight", "D", "model.norm.weight", "output_norm.weight"),
        WeightRow("head.weight", "VD", "lm_head.weight", "output.weight", when=has_head),
    )
    if interleaved:  # GGUF converters write frequency factors only for these families
        rows += (WeightRow("rope.factors", "c", None, "rope_freqs.weight", optional=True),)
    return rows


_INPUT_NORMS = (
    _row("attn_norm", "D", "input_layernorm", "attn_norm"),
    _row("mlp_norm", "D", "post_attention_layernorm", "ffn_norm"),
)
_OUTPUT_NORMS = (
    _row("attn_norm", "D", "post_attention_layernorm", "post_attention_norm"),
    _row("mlp_norm", "D", "post_feedforward_layernorm", "post_ffw_norm"),
)


def _head_norms(q: str, k: str) -> tuple[WeightRow, ...]:
    return (
        _row("attn.q_norm", q, "self_attn.q_norm", "attn_q_norm"),
        _row("attn.k_norm", k, "self_attn.k_norm", "attn_k_norm"),
    )


# The sliding window of a Mistral config that lacks the key "sliding_window". Transformers has the
# same default. If the key is there with the value null, the model has no window.
_MISTRAL_WINDOW = 4096


def _mistral_window(reader: Reader, found: Settings) -> Settings:
    if reader.read(str, "model_type", default=None) != "mistral":
        return {}
    if not reader.has("sliding_window"):
        return {"sliding_window": _MISTRAL_WINDOW}
    return {"sliding_window": reader.read(int, "sliding_window", default=None)}


def _qwen_window(reader: Reader, found: Settings) -> Settings:
    return {"sliding_window": uniform_window(reader, found["num_layers"])}


def _whole_rotation(reader: Reader, found: Settings) -> Settings:
    """Rejects GGUF models in which RoPE rotates only a part of each head. Converters permute the
    rows of a head as if the whole head were rotated. The loader can undo this only if it is.
    """
    prefix, size = reader.read(str, "general.architecture"), found["head_dim"]
    if found["rope"].dim != size:
        raise ModelFormatError(
            f"GGUF metadata: key '{prefix}.rope.dimension_count' must equal the head size "
            f"({size}): partial rotation is not supported"
        )
    return {}


def _granite_rotation(reader: Reader, found: Settings) -> Settings:
    """Rejects GGUF files whose `rope.scaling.finetuned` is false. In Granite files, this means that
    the model does not use RoPE.
    """
    if not reader.read(bool, "granite.rope.scaling.finetuned", default=True):
        raise ModelFormatError(
            "GGUF metadata: key 'granite.rope.scaling.finetuned': attention without rotation is "
            "not supported"
        )
    return _whole_rotation(reader, found)


# Llama 1 to 3, Mistral, SmolLM and other models whose files name the Llama architecture.
LLAMA = Family(
    name="llama",
    hf_names=("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM"),
    gguf_names=("llama",),
    weights=_weights(_INPUT_NORMS, interleaved=True),
    hf_keys=_HF_KEYS | _ATTENTION_BIAS | _MLP_BIAS,
    gguf_keys=_GGUF_KEYS,
    hf_more=_mistral_window,
    gguf_more=_whole_rotation,
)
# Qwen2 and Qwen2.5: the projections of queries, keys and values have biases.
QWEN2 = Family(
    name="qwen2",
    hf_names=("Qwen2ForCausalLM",),
    gguf_names=("qwen2",),
    weights=_weights(_INPUT_NORMS),
    hf_keys=_HF_KEYS,
    gguf_keys=_GGUF_KEYS,
    always={"qkv_bias": True},
    hf_more=_qwen_window,
)
# Qwen3, dense models: each query and key head has a norm. The config must state the head size.
QWEN3 = Family(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    gguf_names=("qwen3",),
    weights=_weights(_INPUT_NORMS, _head_norms("H", "H")),
    hf_keys=_HF_KEYS | _ATTENTION_BIAS,
    gguf_keys=_GGUF_KEYS,
    always={"qk_norm": "head"},
    defaults={"head_dim": REQUIRED},
    hf_more=_qwen_window,
)
# Granite 3, dense models: Llama with multipliers for embeddings, residuals, attention and logits.
GRANITE = Family(
    name="granite",
    hf_names=("GraniteForCausalLM",),
    gguf_names=("granite",),
    weights=_weights(_INPUT_NORMS, interleaved=True),
    hf_keys=_HF_KEYS
    | _ATTENTION_BIAS
    | _MLP_BIAS
    | {
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "attention_multiplier": "attention_multiplier",
        "logits_scaling": "logits_scaling",
    },
    gguf_keys=_GGUF_KEYS
    | {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    },
    hf_defaults={"attention_multiplier": 1.0},
    gguf_more=_granite_rotation,
)
# OLMo 2: norms apply to the outputs of attention and MLP, and to q and k over all heads together.
OLMO2 = Family(
    name="olmo2",
    hf_names=("Olmo2ForCausalLM",),
    gguf_names=("olmo2",),
    weights=_weights(_OUTPUT_NORMS, _head_norms("q", "k")),
    hf_keys=_HF_KEYS | _ATTENTION_BIAS,
    gguf_keys=_GGUF_KEYS,
    always={"norm_placement": "output", "qk_norm": "whole"},
)
