"""Families whose files store gate and up as one matrix: Phi-3 and 4, GLM-4."""

from engine.architectures.base import Reader
from engine.architectures.common import (
    BOTH_PAIRED,
    FUSED_MLP,
    GGUF_KEYS,
    HF_KEYS,
    Rows,
    attention,
    decoder,
    input_norms,
    norm,
    row,
)
from engine.architectures.family import Family, Settings
from engine.architectures.weight_rows import Stored


def _of_qkv(index: int, size: str) -> Rows:
    name, fused = "qkv"[index], Stored("qkk", index)
    hf, gguf = "self_attn.qkv_proj", "attn_qkv"
    return (row(f"attn.{name}", f"{size}D", hf, gguf, hf_stored=fused, gguf_stored=fused),)


def _window(reader: Reader, found: Settings) -> Settings:
    return {"sliding_window": reader.read(int, "sliding_window", default=None)}


# Phi-3, Phi-3.5 and Phi-4: q, k and v are one matrix, too.
PHI3 = Family(
    name="phi3",
    hf_names=("Phi3ForCausalLM",),
    gguf_names=("phi3",),
    weights=decoder(
        (*_of_qkv(0, "q"), *_of_qkv(1, "k"), *_of_qkv(2, "k")),
        attention()[3:],
        FUSED_MLP,
        input_norms(),
    ),
    hf_keys=HF_KEYS,
    gguf_keys=GGUF_KEYS,
    hf_more=_window,
)
_GLM_DEFAULTS = {"qkv_bias": True, "head_dim": 128, "norm_eps": 1.5625e-07}
# GLM-4 9B: half of each head is rotated. Both formats interleave rotary pairs.
GLM = Family(
    name="glm",
    hf_names=("GlmForCausalLM",),
    gguf_names=("chatglm",),
    weights=decoder(BOTH_PAIRED, FUSED_MLP, input_norms()),
    hf_keys=HF_KEYS | {"attention_bias": "qkv_bias"},
    gguf_keys=GGUF_KEYS,
    hf_defaults=_GLM_DEFAULTS,
    rotated=0.5,
)
# GLM-4-0414 and GLM-Z1: GLM with norms of the inputs and of the outputs of attention and MLP.
GLM4 = Family(
    name="glm4",
    hf_names=("Glm4ForCausalLM",),
    gguf_names=("glm4",),
    weights=decoder(
        BOTH_PAIRED,
        FUSED_MLP,
        (
            norm("attn_norm", "input_layernorm", "attn_norm"),
            norm("attn_out_norm", "post_self_attn_layernorm", "post_attention_norm"),
            norm("mlp_norm", "post_attention_layernorm", "ffn_norm"),
            norm("mlp_out_norm", "post_mlp_layernorm", "post_ffw_norm"),
        ),
    ),
    hf_keys=HF_KEYS | {"attention_bias": "qkv_bias"},
    gguf_keys=GGUF_KEYS,
    always={"norm_placement": "both"},
    hf_defaults=_GLM_DEFAULTS,
    rotated=0.5,
)
