"""The roofline of a workload: the min time on a GPU, from the bytes to read and the FLOPs to
compute.

Prefill is bound by arithmetic. Each decode step is bound by memory bandwidth or arithmetic,
whichever takes longer. The model assumes that all requests run together from the start, that a
shared prefix is computed once and read once per step, and that only weights, keys and values count.
In a mixture of experts, a step reads the experts that at least one token has chosen. The model
assumes that tokens choose independently, each expert with the same probability.
"""

from dataclasses import dataclass, replace

from benchmarks.gpu.workloads import Workload
from engine.architectures.base import ModelConfig


@dataclass(frozen=True, slots=True)
class Card:
    """Measured limits of a card."""

    name: str
    bytes_per_s: float  # device-to-device copy, read plus write
    flops_per_s: float  # large bfloat16 matmul
    weight_bytes: float = 2  # per weight
    kv_bytes: float = 2  # per value of the KV cache
    matmul_speed: float = 1  # of matmuls with weights, relative to bfloat16


H200 = Card("H200", 4.25e12, 803e12)


def quantized(card: Card, quantization: str, kv_dtype: str) -> Card:
    """The limits of a card for a quantized model. Float8 tensor cores are twice as fast."""
    return replace(
        card,
        weight_bytes={"auto": 2, "fp8": 1, "int8": 17 / 16}[quantization],
        matmul_speed=2 if quantization == "fp8" else 1,
        kv_bytes=1 if kv_dtype == "fp8" else 2,
    )


def roof_seconds(config: ModelConfig, workload: Workload, card: Card = H200) -> float:
    return _prompts_s(config, workload, card) + _steps_s(config, workload, card)


def weight_bytes(config: ModelConfig, num_tokens: int = 1, card: Card = H200) -> float:
    """Bytes that a step of this many tokens reads: all matrices and the head, but only a few rows
    of the embeddings.
    """
    experts = _expert_params(config)
    read = _layer_params(config) - experts * (1 - _chosen_share(config)) ** num_tokens
    return card.weight_bytes * (read + _head_params(config))


def _head_params(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def _layer_params(config: ModelConfig) -> int:
    return config.num_params - _head_params(config) * (1 if config.tie_embeddings else 2)


def _expert_params(config: ModelConfig) -> int:
    """Number of weights of all routed experts."""
    if config.experts is None:
        return 0
    layers = sum(config.layer(index).experts for index in range(config.num_layers))
    return layers * 3 * config.hidden_size * config.experts.count * config.experts.size


def _chosen_share(config: ModelConfig) -> float:
    """The share of the experts that a token chooses."""
    return 1.0 if config.experts is None else config.experts.per_token / config.experts.count


def _active_params(config: ModelConfig) -> float:
    """Number of weights in the layers that a token is multiplied by."""
    return _layer_params(config) - _expert_params(config) * (1 - _chosen_share(config))


def _attention_flops(config: ModelConfig, num_pairs: float) -> float:
    """FLOPs of attention over (query, key) pairs: the scores, and the weighted sum of values."""
    return 4.0 * config.num_layers * config.num_heads * config.head_dim * num_pairs


def _prompts_s(config: ModelConfig, workload: Workload, card: Card) -> float:
    shared = workload.num_shared
    own = [len(prompt) - shared for prompt in workload.prompts]
    num_tokens = shared + sum(own)
    pairs = shared**2 / 2 + sum(length * shared + length**2 / 2 for length in own)
    flops = 2.0 * (_active_params(config) * num_tokens + _head_params(config) * len(own))
    flops = flops / card.matmul_speed + _attention_flops(config, pairs)
    return max(flops / card.flops_per_s, weight_bytes(config, num_tokens, card) / card.bytes_per_s)


def _steps_s(config: ModelConfig, workload: Workload, card: Card) -> float:
    """Time of the decode steps after each request's first token."""
    shared = workload.num_shared
    token_bytes = card.kv_bytes * config.kv_bytes_per_token(1)
    params = _active_params(config) + _head_params(config)
    rows = list(zip(map(len, workload.prompts), workload.num_new, strict=True))
    total = 0.0
    for step in range(1, max(workload.num_new)):
        contexts = [length + step for length, count in rows if count > step]
        kept = shared + sum(length - shared for length in contexts)
        read = weight_bytes(config, len(contexts), card) + token_bytes * kept
        flops = 2.0 * params * len(contexts) / card.matmul_speed
        flops += _attention_flops(config, sum(contexts))
        total += max(read / card.bytes_per_s, flops / card.flops_per_s)
    return total
