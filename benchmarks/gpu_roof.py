"""The least time that a GPU could take for a workload, from what must be read and multiplied.

Prompts are bound by arithmetic; generating is bound, step by step, by whichever of reading and
arithmetic takes longer. All requests run side by side from the start, a shared prefix is computed
once and read once per step, and nothing but matrices, keys and values counts.
"""

from dataclasses import dataclass

from benchmarks.gpu_workloads import Workload
from engine.backends.custom.architectures.base import ModelConfig

VALUE_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Card:
    """What a card was measured to do."""

    name: str
    bytes_per_s: float  # a device copy, read and write
    flops_per_s: float  # a large bfloat16 product


H200 = Card("H200", 4.25e12, 803e12)


def roof_seconds(config: ModelConfig, workload: Workload, card: Card = H200) -> float:
    return _prompts_s(config, workload, card) + _steps_s(config, workload, card)


def weight_bytes(config: ModelConfig) -> int:
    """What every step reads: all matrices and the head, but of the embeddings a few rows only."""
    return VALUE_BYTES * (_layer_params(config) + _head_params(config))


def _head_params(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def _layer_params(config: ModelConfig) -> int:
    return config.num_params - _head_params(config) * (1 if config.tie_embeddings else 2)


def _attention_flops(config: ModelConfig, num_pairs: float) -> float:
    """Of queries with the keys they see: scores, and the sum of values."""
    return 4.0 * config.num_layers * config.num_heads * config.head_dim * num_pairs


def _prompts_s(config: ModelConfig, workload: Workload, card: Card) -> float:
    shared = workload.num_shared
    own = [len(prompt) - shared for prompt in workload.prompts]
    num_tokens = shared + sum(own)
    pairs = shared**2 / 2 + sum(length * shared + length**2 / 2 for length in own)
    flops = 2.0 * _layer_params(config) * num_tokens + _attention_flops(config, pairs)
    flops += 2.0 * _head_params(config) * len(own)
    return max(flops / card.flops_per_s, weight_bytes(config) / card.bytes_per_s)


def _steps_s(config: ModelConfig, workload: Workload, card: Card) -> float:
    """The steps after the first token of each request."""
    shared = workload.num_shared
    token_bytes = config.kv_bytes_per_token(VALUE_BYTES)
    params = _layer_params(config) + _head_params(config)
    rows = list(zip(map(len, workload.prompts), workload.num_new, strict=True))
    total = 0.0
    for step in range(1, max(workload.num_new)):
        contexts = [length + step for length, count in rows if count > step]
        kept = shared + sum(length - shared for length in contexts)
        read = weight_bytes(config) + token_bytes * kept
        flops = 2.0 * params * len(contexts) + _attention_flops(config, sum(contexts))
        total += max(read / card.bytes_per_s, flops / card.flops_per_s)
    return total
