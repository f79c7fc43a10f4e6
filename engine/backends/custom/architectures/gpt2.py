"""GPT-2: learned positions, layer norms with biases, one fused projection for query, key and value.

Hugging Face stores its projections transposed, (in, out); GGUF converters have turned them already.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.backends.custom.architectures.base import (
    ModelConfig,
    Reader,
    TensorSpec,
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
    refuse_unsupported_hf,
    refuse_values,
)

HF_NAMES = ("GPT2LMHeadModel",)
GGUF_NAMES = ("gpt2",)
HF_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
HF_ACTIVATION = "activation_function"
GGUF_KEYS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position",
    "attention.layer_norm_epsilon": "norm_eps",
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    refuse_unsupported_hf(config)
    refuse_values(
        config,
        {
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "add_cross_attention": True,
        },
    )
    reader = Reader(config, "config.json")
    vocab_size = reader.read(int, "vocab_size")
    hidden_size = reader.read(int, "n_embd")
    num_heads = reader.read(int, "n_head")
    return check_config(
        ModelConfig(
            family="gpt2",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=reader.read(int, "n_layer"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=heads_split(hidden_size, num_heads),
            intermediate_size=reader.read(int, "n_inner", default=4 * hidden_size),
            max_position=reader.read(int, "n_positions"),
            norm_eps=reader.read(float, "layer_norm_epsilon"),
            tie_embeddings=reader.read(bool, "tie_word_embeddings", default=True),
            rope=None,
            norm="layer",
            activation=hf_activation(reader, "activation_function", default="gelu_new"),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            bos_id=hf_bos_id(config, vocab_size),
            eos_ids=hf_eos_ids(config, vocab_size),
        )
    )


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    reader = Reader(metadata, "GGUF metadata")
    vocab_size = gguf_vocab_size(metadata)
    hidden_size = reader.read(int, "gpt2.embedding_length")
    num_heads = reader.read(int, "gpt2.attention.head_count")
    return check_config(
        ModelConfig(
            family="gpt2",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=reader.read(int, "gpt2.block_count"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=heads_split(hidden_size, num_heads),
            intermediate_size=reader.read(int, "gpt2.feed_forward_length"),
            max_position=reader.read(int, "gpt2.context_length"),
            norm_eps=reader.read(float, "gpt2.attention.layer_norm_epsilon"),
            tie_embeddings=False,
            rope=None,
            norm="layer",
            activation="gelu_tanh",
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            bos_id=gguf_bos_id(metadata, vocab_size),
            eos_ids=gguf_eos_ids(metadata, vocab_size),
        )
    )


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    positions = (config.max_position, hidden)
    specs = [
        TensorSpec("embed.weight", table, "transformer.wte.weight", "token_embd.weight"),
        TensorSpec("position.weight", positions, "transformer.wpe.weight", "position_embd.weight"),
    ]
    for layer in range(config.num_layers):
        specs.extend(_layer_tensors(config, layer))
    for part in ("weight", "bias"):
        specs.append(
            TensorSpec(f"norm.{part}", (hidden,), f"transformer.ln_f.{part}", f"output_norm.{part}")
        )
    if not config.tie_embeddings:
        specs.append(TensorSpec("head.weight", table, "lm_head.weight", "output.weight"))
    return tuple(specs)


def _layer_tensors(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    ours, hf, gguf = f"layers.{layer}", f"transformer.h.{layer}", f"blk.{layer}"
    for name, hf_name, gguf_name in (
        ("attn_norm", "ln_1", "attn_norm"),
        ("mlp_norm", "ln_2", "ffn_norm"),
    ):
        for part in ("weight", "bias"):
            yield TensorSpec(
                f"{ours}.{name}.{part}",
                (hidden,),
                f"{hf}.{hf_name}.{part}",
                f"{gguf}.{gguf_name}.{part}",
            )
    for name, hf_name, gguf_name, rows, columns in (
        ("attn.qkv", "attn.c_attn", "attn_qkv", 3 * hidden, hidden),
        ("attn.o", "attn.c_proj", "attn_output", hidden, hidden),
        ("mlp.up", "mlp.c_fc", "ffn_up", inner, hidden),
        ("mlp.down", "mlp.c_proj", "ffn_down", hidden, inner),
    ):
        yield TensorSpec(
            f"{ours}.{name}.weight",
            (rows, columns),
            f"{hf}.{hf_name}.weight",
            f"{gguf}.{gguf_name}.weight",
            hf_transform="transpose",
        )
        yield TensorSpec(
            f"{ours}.{name}.bias", (rows,), f"{hf}.{hf_name}.bias", f"{gguf}.{gguf_name}.bias"
        )
