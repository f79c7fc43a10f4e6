"""GPT-2: learned positions, layer norms with biases, one fused projection for query, key and value.

Hugging Face checkpoints store the projection matrices as (in, out), GGUF files as (out, in).
"""

from engine.backends.custom.architectures.family import Family, Stored, WeightRow, has_head

_L, _HF, _B = "layers.{i}", "transformer.h.{i}", "blk.{i}"


def _norm(name: str, hf: str, gguf: str) -> WeightRow:
    return WeightRow(f"{name}.weight", "D", f"{hf}.weight", f"{gguf}.weight", bias="norm_bias")


def _linear(name: str, shape: str, hf: str, gguf: str, bias: str) -> WeightRow:
    return WeightRow(
        f"{_L}.{name}.weight",
        shape,
        f"{_HF}.{hf}.weight",
        f"{_B}.{gguf}.weight",
        bias=bias,
        hf_stored=Stored(transposed=True),
    )


def _of_qkv(index: int) -> WeightRow:
    """The row of q, k or v, which the file stores as one matrix."""
    return WeightRow(
        f"{_L}.attn.{'qkv'[index]}.weight",
        "DD",
        f"{_HF}.attn.c_attn.weight",
        f"{_B}.attn_qkv.weight",
        bias="qkv_bias",
        hf_stored=Stored("DDD", index, transposed=True),
        gguf_stored=Stored("DDD", index),
    )


GPT2 = Family(
    name="gpt2",
    hf_names=("GPT2LMHeadModel",),
    gguf_names=("gpt2",),
    weights=(
        WeightRow("embed.weight", "VD", "transformer.wte.weight", "token_embd.weight"),
        WeightRow("position.weight", "PD", "transformer.wpe.weight", "position_embd.weight"),
        _norm(f"{_L}.attn_norm", f"{_HF}.ln_1", f"{_B}.attn_norm"),
        _norm(f"{_L}.mlp_norm", f"{_HF}.ln_2", f"{_B}.ffn_norm"),
        *(_of_qkv(index) for index in range(3)),
        _linear("attn.o", "Dq", "attn.c_proj", "attn_output", "out_bias"),
        _linear("mlp.up", "FD", "mlp.c_fc", "ffn_up", "mlp_bias"),
        _linear("mlp.down", "DF", "mlp.c_proj", "ffn_down", "mlp_bias"),
        _norm("norm", "transformer.ln_f", "output_norm"),
        WeightRow("head.weight", "VD", "lm_head.weight", "output.weight", when=has_head),
    ),
    hf_keys={
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    gguf_keys={
        "vocab_size": "vocab_size",
        "embedding_length": "hidden_size",
        "block_count": "num_layers",
        "attention.head_count": "num_heads",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position",
        "attention.layer_norm_epsilon": "norm_eps",
    },
    hf_activation=("activation_function", "gelu_new"),
    always={
        "rope": None,
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    hf_defaults={
        "intermediate_size": lambda found: 4 * found["hidden_size"],
        "tie_embeddings": True,
    },
    hf_refused={
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "add_cross_attention": True,
    },
)
