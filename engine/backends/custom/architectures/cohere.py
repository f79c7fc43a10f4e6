"""Cohere's Command models: attention and MLP read the same normalized input, norms are layer norms
without bias, and both formats interleave rotary pairs.
"""

from engine.backends.custom.architectures.common import (
    ATTENTION_BIAS,
    BOTH_PAIRED,
    GATED_MLP,
    GGUF_LAYER_NORM_KEYS,
    decoder,
    layer_keys,
    norm,
)
from engine.backends.custom.architectures.family import Family
from engine.backends.custom.architectures.foreign import ANY
from engine.backends.custom.architectures.layers import alternating

_WEIGHTS = decoder(BOTH_PAIRED, GATED_MLP, (norm("attn_norm", "input_layernorm", "attn_norm"),))
_HF_KEYS = layer_keys("layer_norm_eps") | ATTENTION_BIAS | {"logit_scale": "1/logits_scaling"}
_GGUF_KEYS = GGUF_LAYER_NORM_KEYS | {"logit_scale": "1/logits_scaling"}
# Command-R, Command-R+ and Aya, if they have no norms of queries and keys.
COHERE = Family(
    name="cohere",
    hf_names=("CohereForCausalLM",),
    gguf_names=("command-r",),
    weights=_WEIGHTS,
    hf_keys=_HF_KEYS,
    gguf_keys=_GGUF_KEYS,
    always={"norm": "layer", "parallel": "shared"},
    hf_defaults={"tie_embeddings": True, "logits_scaling": 16.0, "norm_eps": 1e-5},
    hf_refused={"use_qk_norm": ANY},
    theta=500_000.0,
)
_LAYERS = alternating(4, window=4096, rotates_global=False)
# Command-R7B and Command-A: most layers have a window, and only these rotate queries and keys.
COHERE2 = Family(
    name="cohere2",
    hf_names=("Cohere2ForCausalLM",),
    gguf_names=("cohere2",),
    weights=_WEIGHTS,
    hf_keys=_HF_KEYS,
    gguf_keys=_GGUF_KEYS,
    always={"norm": "layer", "parallel": "shared"},
    hf_defaults={"tie_embeddings": True, "logits_scaling": 16.0, "norm_eps": 1e-5},
    hf_refused={"use_qk_norm": ANY},
    hf_more=_LAYERS[0],
    gguf_more=_LAYERS[1],
)
