"""Rows and keys that many decoder families share. Most families use the names of Llama's files.

Each function returns rows of weights that every layer has.
"""

from dataclasses import replace

from engine.architectures.base import ModelConfig
from engine.architectures.family import Keys
from engine.architectures.weight_rows import (
    PAIRED,
    PLAIN,
    Condition,
    Stored,
    WeightRow,
    has_head,
)

Rows = tuple[WeightRow, ...]


def is_dense(config: ModelConfig, layer: int) -> bool:
    return config.layer(layer).mlp and not config.layer(layer).experts


def has_experts(config: ModelConfig, layer: int) -> bool:
    return config.layer(layer).experts


def has_shared(config: ModelConfig, layer: int) -> bool:
    """Whether the layer has a shared expert beside the others."""
    return (
        has_experts(config, layer) and config.experts is not None and config.experts.shared_size > 0
    )


def has_qk_norm(config: ModelConfig, layer: int) -> bool:
    return config.qk_norm is not None and attends(config, layer)


def has_mlp_norm(config: ModelConfig, layer: int) -> bool:
    """Whether the layer has an MLP that does not use the normalized input of attention."""
    return config.parallel != "shared" and config.layer(layer).mlp


HF_KEYS: Keys = {
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
ATTENTION_BIAS: Keys = {"attention_bias": ("qkv_bias", "out_bias")}
MLP_BIAS: Keys = {"mlp_bias": "mlp_bias"}
_GGUF_SIZES: Keys = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position",
}
GGUF_KEYS: Keys = _GGUF_SIZES | {"attention.layer_norm_rms_epsilon": "norm_eps"}
# For models with layer norms instead of RMS norms.
GGUF_LAYER_NORM_KEYS: Keys = _GGUF_SIZES | {"attention.layer_norm_epsilon": "norm_eps"}
GGUF_EXPERT_KEYS: Keys = {
    "expert_count": "experts.count",
    "expert_used_count": "experts.per_token",
    "expert_feed_forward_length": "experts.size",
    "expert_shared_feed_forward_length": "experts.shared_size",
}


def attends(config: ModelConfig, layer: int) -> bool:
    return config.layer(layer).mixer == "attention"


def has_mixer(config: ModelConfig, layer: int) -> bool:
    return config.layer(layer).mixer != "none"


def layer_keys(norm_eps: str) -> Keys:
    """The usual keys of config.json, with another name for the epsilon of the norms."""
    return {norm_eps if name == "norm_eps" else key: name for key, name in HF_KEYS.items()}


def row(
    name: str,
    shape: str,
    hf: str,
    gguf: str,
    bias: str | None = None,
    when: Condition | None = None,
    hf_stored: Stored = PLAIN,
    gguf_stored: Stored = PLAIN,
) -> WeightRow:
    """A weight that every layer has. Names are without the layer's prefix and ".weight"."""
    return WeightRow(
        f"layers.{{i}}.{name}.weight",
        shape,
        f"model.layers.{{i}}.{hf}.weight",
        f"blk.{{i}}.{gguf}.weight",
        bias,
        when,
        hf_stored,
        gguf_stored,
    )


def norm(name: str, hf: str, gguf: str, added: float = 0.0) -> WeightRow:
    """A norm over the hidden size. `added`: our values are those of Hugging Face plus this."""
    when = has_mlp_norm if name == "mlp_norm" else has_mixer
    return row(name, "D", hf, gguf, "norm_bias", when, Stored(added=added))


def input_norms(added: float = 0.0, mlp: str = "ffn_norm") -> Rows:
    """Norms of the inputs of attention and MLP. `mlp` is the GGUF name of the second."""
    return (
        norm("attn_norm", "input_layernorm", "attn_norm", added),
        norm("mlp_norm", "post_attention_layernorm", mlp, added),
    )


OUTPUT_NORMS = (
    norm("attn_norm", "post_attention_layernorm", "post_attention_norm"),
    norm("mlp_norm", "post_feedforward_layernorm", "post_ffw_norm"),
)


def head_norms(q: str, k: str, added: float = 0.0) -> Rows:
    """Norms of queries and keys."""
    return tuple(
        row(
            f"attn.{part}_norm",
            shape,
            f"self_attn.{part}_norm",
            f"attn_{part}_norm",
            when=has_qk_norm,
            hf_stored=Stored(added=added),
        )
        for part, shape in (("q", q), ("k", k))
    )


def attention(hf_stored: Stored = PLAIN, gguf_stored: Stored = PLAIN) -> Rows:
    """`hf_stored` and `gguf_stored` say how the files store q and k."""
    how = (hf_stored, gguf_stored)
    return (
        row("attn.q", "qD", "self_attn.q_proj", "attn_q", "qkv_bias", attends, *how),
        row("attn.k", "kD", "self_attn.k_proj", "attn_k", "qkv_bias", attends, *how),
        row("attn.v", "kD", "self_attn.v_proj", "attn_v", "qkv_bias", attends),
        row("attn.o", "Do", "self_attn.o_proj", "attn_output", "out_bias", attends),
    )


GATED_MLP = (
    row("mlp.gate", "FD", "mlp.gate_proj", "ffn_gate", "mlp_bias", is_dense),
    row("mlp.up", "FD", "mlp.up_proj", "ffn_up", "mlp_bias", is_dense),
    row("mlp.down", "DF", "mlp.down_proj", "ffn_down", "mlp_bias", is_dense),
)
# Gate and up are one matrix in both formats.
FUSED_MLP = (
    *(
        row(
            f"mlp.{name}",
            "FD",
            "mlp.gate_up_proj",
            "ffn_up",
            hf_stored=Stored("FF", index),
            gguf_stored=Stored("FF", index),
        )
        for index, name in enumerate(("gate", "up"))
    ),
    row("mlp.down", "DF", "mlp.down_proj", "ffn_down"),
)


def plain_mlp(up: str, down: str) -> Rows:
    """An MLP without a gate, by its names in Hugging Face's files."""
    return (
        row("mlp.up", "FD", up, "ffn_up", "mlp_bias"),
        row("mlp.down", "DF", down, "ffn_down", "mlp_bias"),
    )


def experts(hf: str, router: str, gate: str, up: str, down: str) -> Rows:
    """A mixture of experts whose matrices Hugging Face stores one by one. `hf` is the prefix of all
    names, such as "mlp".
    """
    rows = [row("experts.router", "ED", f"{hf}.{router}", "ffn_gate_inp", when=has_experts)]
    for name, shape, theirs in (("gate", "EXD", gate), ("up", "EXD", up), ("down", "EDX", down)):
        each = f"{hf}.experts.{{e}}.{theirs}"
        rows.append(row(f"experts.{name}", shape, each, f"ffn_{name}_exps", when=has_experts))
    return tuple(rows)


def shared_expert(hf: str) -> Rows:
    """The shared expert. `hf` is the prefix of its names."""
    return tuple(
        row(f"shared.{name}", shape, f"{hf}.{name}_proj", f"ffn_{name}_shexp", when=has_shared)
        for name, shape in (("gate", "SD"), ("up", "SD"), ("down", "DS"))
    )


ROPE_FACTORS = WeightRow("rope.factors", "c", None, "rope_freqs.weight", optional=True)


FINAL_NORM = ("model.norm.weight", "output_norm.weight")


def decoder(
    *layer: Rows,
    added: float = 0.0,
    factors: bool = False,
    norm: tuple[str, str] = FINAL_NORM,
) -> Rows:
    """All weights of a decoder with these rows per layer. `added`: see the function `norm`.
    `factors`: a GGUF file may have a vector of RoPE frequency factors. `norm` has the names of the
    final norm in Hugging Face's files and in GGUF.
    """
    return (
        WeightRow("embed.weight", "VD", "model.embed_tokens.weight", "token_embd.weight"),
        *(each for rows in layer for each in rows),
        WeightRow(
            "norm.weight",
            "D",
            *norm,
            "norm_bias",
            hf_stored=Stored(added=added),
        ),
        WeightRow("head.weight", "VD", "lm_head.weight", "output.weight", when=has_head),
        *((ROPE_FACTORS,) if factors else ()),
    )


def renamed(rows: Rows, names: dict[str, str]) -> Rows:
    """The rows with other names in Hugging Face's files."""

    def new(name: str) -> str:
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        return name

    return tuple(replace(each, hf=each.hf and new(each.hf)) for each in rows)


# Attention of families whose GGUF files interleave the rotary pairs of q and k.
GGUF_PAIRED = attention(gguf_stored=PAIRED)
# Attention of families in which both formats do.
BOTH_PAIRED = attention(PAIRED, PAIRED)
