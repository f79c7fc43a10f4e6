"""What Llama, Qwen2 and Qwen3 share: pre-norm RMS blocks, rotary attention, gated feed-forward.

The family files say what differs. GGUF metadata leaves some facts to the presence of tensors (tied
head, biases, frequency factors); `weights.model` settles those once the file is open.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.backends.custom.architectures.base import (
    ModelConfig,
    Reader,
    TensorSpec,
    Transform,
    check_config,
)
from engine.backends.custom.architectures.foreign import (
    gguf_bos_id,
    gguf_eos_ids,
    gguf_vocab_size,
    heads_split,
    hf_activation,
    hf_bos_id,
    hf_eos_ids,
    refuse_unsupported_gguf,
    refuse_unsupported_hf,
)
from engine.backends.custom.architectures.rope import (
    rope_from_gguf,
    rope_from_hf,
    stretched_position,
)

# Keys of a config.json and of GGUF metadata -> the field that each holds.
HF_KEYS = {
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
HF_ACTIVATION = "hidden_act"
GGUF_KEYS = {
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


def config_from_hf(
    config: Mapping[str, Any],
    family: str,
    *,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
) -> ModelConfig:
    refuse_unsupported_hf(config)
    reader = Reader(config, "config.json")
    vocab_size = reader.read(int, "vocab_size")
    hidden_size = reader.read(int, "hidden_size")
    num_heads = reader.read(int, "num_attention_heads")
    head_dim = reader.read(int, "head_dim", default=None) or heads_split(hidden_size, num_heads)
    max_position = reader.read(int, "max_position_embeddings")
    rope = rope_from_hf(config, head_dim, max_position)
    return check_config(
        ModelConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=reader.read(int, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=reader.read(int, "num_key_value_heads", default=num_heads),
            head_dim=head_dim,
            intermediate_size=reader.read(int, "intermediate_size"),
            max_position=stretched_position(rope, max_position),
            norm_eps=reader.read(float, "rms_norm_eps"),
            tie_embeddings=reader.read(bool, "tie_word_embeddings", default=False),
            rope=rope,
            activation=hf_activation(reader, "hidden_act", default="silu"),
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            sliding_window=sliding_window,
            bos_id=hf_bos_id(config, vocab_size),
            eos_ids=hf_eos_ids(config, vocab_size),
        )
    )


def config_from_gguf(
    metadata: Mapping[str, Any], family: str, *, qkv_bias: bool = False, qk_norm: bool = False
) -> ModelConfig:
    refuse_unsupported_gguf(metadata)
    reader = Reader(metadata, "GGUF metadata")
    prefix = reader.read(str, "general.architecture")
    vocab_size = gguf_vocab_size(metadata)
    hidden_size = reader.read(int, f"{prefix}.embedding_length")
    num_heads = reader.read(int, f"{prefix}.attention.head_count")
    key_length = reader.read(int, f"{prefix}.attention.key_length", default=None)
    head_dim = key_length or heads_split(hidden_size, num_heads)
    max_position = reader.read(int, f"{prefix}.context_length")
    rope = rope_from_gguf(metadata, head_dim, max_position)
    return check_config(
        ModelConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=reader.read(int, f"{prefix}.block_count"),
            num_heads=num_heads,
            num_kv_heads=reader.read(int, f"{prefix}.attention.head_count_kv", default=num_heads),
            head_dim=head_dim,
            intermediate_size=reader.read(int, f"{prefix}.feed_forward_length"),
            max_position=stretched_position(rope, max_position),
            norm_eps=reader.read(float, f"{prefix}.attention.layer_norm_rms_epsilon"),
            tie_embeddings=False,
            rope=rope,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            # 0 is how GGUF writers say "no window".
            sliding_window=reader.read(int, f"{prefix}.attention.sliding_window", default=None)
            or None,
            bos_id=gguf_bos_id(metadata, vocab_size),
            eos_ids=gguf_eos_ids(metadata, vocab_size),
        )
    )


def tensors(config: ModelConfig, *, gguf_interleaved: bool) -> tuple[TensorSpec, ...]:
    """All weights. `gguf_interleaved`: GGUF stores this family's rotary pairs side by side."""
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    specs = [TensorSpec("embed.weight", table, "model.embed_tokens.weight", "token_embd.weight")]
    for layer in range(config.num_layers):
        specs.extend(_layer_tensors(config, layer, gguf_interleaved))
    specs.append(TensorSpec("norm.weight", (hidden,), "model.norm.weight", "output_norm.weight"))
    if not config.tie_embeddings:
        specs.append(TensorSpec("head.weight", table, "lm_head.weight", "output.weight"))
    return tuple(specs)


def _layer_tensors(config: ModelConfig, layer: int, gguf_interleaved: bool) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    ours, hf, gguf = f"layers.{layer}", f"model.layers.{layer}", f"blk.{layer}"
    permuted: dict[str, Transform] = (
        {"attn.q": "unpermute_q", "attn.k": "unpermute_k"} if gguf_interleaved else {}
    )
    linears = (
        ("attn.q", "self_attn.q_proj", "attn_q", queries, hidden, config.qkv_bias),
        ("attn.k", "self_attn.k_proj", "attn_k", keys, hidden, config.qkv_bias),
        ("attn.v", "self_attn.v_proj", "attn_v", keys, hidden, config.qkv_bias),
        ("attn.o", "self_attn.o_proj", "attn_output", hidden, queries, config.out_bias),
        ("mlp.gate", "mlp.gate_proj", "ffn_gate", inner, hidden, config.mlp_bias),
        ("mlp.up", "mlp.up_proj", "ffn_up", inner, hidden, config.mlp_bias),
        ("mlp.down", "mlp.down_proj", "ffn_down", hidden, inner, config.mlp_bias),
    )
    for name, hf_name, gguf_name, rows, columns, has_bias in linears:
        for part, shape in (("weight", (rows, columns)), ("bias", (rows,))):
            if part == "weight" or has_bias:
                yield TensorSpec(
                    f"{ours}.{name}.{part}",
                    shape,
                    f"{hf}.{hf_name}.{part}",
                    f"{gguf}.{gguf_name}.{part}",
                    gguf_transform=permuted.get(name, "none"),
                )
    norms = [
        ("attn_norm", "input_layernorm", "attn_norm", hidden),
        ("mlp_norm", "post_attention_layernorm", "ffn_norm", hidden),
    ]
    if config.qk_norm:
        norms.append(("attn.q_norm", "self_attn.q_norm", "attn_q_norm", config.head_dim))
        norms.append(("attn.k_norm", "self_attn.k_norm", "attn_k_norm", config.head_dim))
    for name, hf_name, gguf_name, size in norms:
        yield TensorSpec(
            f"{ours}.{name}.weight", (size,), f"{hf}.{hf_name}.weight", f"{gguf}.{gguf_name}.weight"
        )
