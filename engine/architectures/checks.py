"""Checks the hyperparameters of a model before memory of these sizes is allocated."""

from engine.architectures.base import MAX_LAYERS, ModelConfig
from engine.core.errors import ModelFormatError


def check_config(config: ModelConfig) -> ModelConfig:
    """Returns the config. Raises `ModelFormatError` if hyperparameters are out of range or
    contradict each other. This check comes before memory of these sizes is allocated.
    """
    rules = {
        "vocab_size >= 1": config.vocab_size >= 1,
        "hidden_size >= 1": config.hidden_size >= 1,
        f"1 <= num_layers <= {MAX_LAYERS}": 1 <= config.num_layers <= MAX_LAYERS,
        "num_heads >= 1": config.num_heads >= 1,
        "num_kv_heads >= 1": config.num_kv_heads >= 1,
        "num_kv_heads divides num_heads": config.num_kv_heads >= 1
        and config.num_heads % config.num_kv_heads == 0,
        "1 <= head_dim <= 1024": 1 <= config.head_dim <= 1024,
        "intermediate_size >= 1": config.intermediate_size >= 1,
        "1 <= max_position <= 2**31 - 1": 1 <= config.max_position <= 2**31 - 1,
        "0 < norm_eps < 1": 0 < config.norm_eps < 1,
        "rope theta > 0": config.rope is None or config.rope.theta > 0,
        "rope dim even and within head_dim": config.rope is None
        or (config.rope.dim % 2 == 0 and 0 < config.rope.dim <= config.head_dim),
        "rope factor > 0": config.rope is None or config.rope.factor > 0,
        "multipliers > 0": all(
            each is None or each > 0
            for each in (
                config.embedding_multiplier,
                config.residual_multiplier,
                config.attention_multiplier,
                config.logits_scaling,
            )
        ),
        "sliding_window >= 1": all(
            each is None or each >= 1
            for each in (config.sliding_window, *(layer.window for layer in config.layers))
        ),
        "as many layer settings as layers": len(config.layers) in (0, config.num_layers),
        "softcaps > 0": all(
            each is None or each > 0 for each in (config.attention_softcap, config.logits_softcap)
        ),
        "alibi_bias > 0": config.alibi_bias is None or config.alibi_bias > 0,
        "1 <= experts per token <= experts <= 4096": config.experts is None
        or 1 <= config.experts.per_token <= config.experts.count <= 4096,
        "expert size >= 1": config.experts is None or config.experts.size >= 1,
        "shared expert size >= 0": config.experts is None or config.experts.shared_size >= 0,
        "expert weight scale > 0": config.experts is None or config.experts.scale > 0,
        **_latent_rules(config),
        "attention in at least one layer": not config.layers
        or any(layer.mixer == "attention" for layer in config.layers),
        "sizes of states in range": config.state is None or config.state.is_sound,
        "token types >= 0": config.encoder is None or config.encoder.num_token_types >= 0,
        "1 <= encoder tokens <= max_position": config.encoder is None
        or 1 <= config.encoder.max_tokens <= config.max_position,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ModelFormatError(f"model hyperparameters break the rule {rule}: {config}")
    return config


def _latent_rules(config: ModelConfig) -> dict[str, bool]:
    latent = config.latent
    if latent is None:
        return {}
    return {
        "kv_rank >= 1": latent.kv_rank >= 1,
        "1 <= q_rank": latent.q_rank is None or latent.q_rank >= 1,
        "1 <= nope_dim <= 1024": 1 <= latent.nope_dim <= 1024,
        "1 <= value_dim <= 1024": 1 <= latent.value_dim <= 1024,
        "one KV head of the latent and the rotated key": config.num_kv_heads == 1
        and config.head_dim == latent.kv_rank + latent.rope_dim,
        "every layer rotates rope_dim values and has no window": all(
            layer.rope is not None and layer.rope.dim == latent.rope_dim and layer.window is None
            for layer in map(config.layer, range(config.num_layers))
        ),
        "latent attention without biases, norms of heads, sinks and soft caps": not (
            config.qkv_bias
            or config.out_bias
            or config.qk_norm
            or config.attention_sinks
            or config.attention_softcap
            or config.alibi_bias
            or config.norm_placement != "input"
            or config.parallel
        ),
    }
