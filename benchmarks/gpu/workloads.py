"""GPU workloads: model shapes, lists of token ids, and the figures to beat.

Ids and weights are random, because speed does not depend on their values. The same seed gives every
engine the same lists. Another seed gives other ids, so that repeats share no prefix by accident.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_POSITION = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's config.json, and how its workloads are sampled."""

    config: Mapping[str, Any]
    first_id: int = 1000
    last_id: int = 128_000  # exclusive
    divisor: int = 1  # divides all lengths and counts, for a tiny smoke-test shape


def _llama(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": MAX_POSITION,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **sizes,
    }


SHAPES = {
    "llama-1b": Shape(
        _llama(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=128_256,
            tie_word_embeddings=True,
        )
    ),
    "llama-8b": Shape(
        _llama(
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128_256,
            tie_word_embeddings=False,
        )
    ),
    "qwen3-30b-a3b": Shape(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": MAX_POSITION,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tie_word_embeddings": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    ),
    "tiny": Shape(
        _llama(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=512,
            tie_word_embeddings=True,
        ),
        first_id=3,
        last_id=512,
        divisor=32,
    ),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once. The first `num_shared` tokens are the same in all prompts."""

    prompts: list[list[int]]
    num_new: list[int]
    num_shared: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_new_tokens(self) -> int:
        return sum(self.num_new)


def workloads(shape: Shape, seed: int = 0) -> dict[str, Workload]:
    """All workloads by name. A seed's result depends on the order in which they are sampled
    here.
    """
    rng = random.Random(seed)
    scale = shape.divisor

    def size(count: int) -> int:
        return max(1, count // scale)

    def ids(count: int) -> list[int]:
        return [rng.randrange(shape.first_id, shape.last_id) for _ in range(count)]

    def several(count: int, length: int) -> list[list[int]]:
        return [ids(size(length)) for _ in range(size(count))]

    single = several(1, 128)
    batch64, batch256, prefill = several(64, 128), several(256, 512), several(16, 4096)
    shared = ids(size(2048))
    prefix = [shared + ids(size(64)) for _ in range(size(256))]
    mixed = [ids(rng.randrange(size(32), size(1024))) for _ in range(size(256))]
    mixed_new = [rng.randrange(size(16), size(512)) for _ in mixed]
    batch1024, long = several(1024, 128), several(32, 7000)
    return {
        "single": Workload(single, [size(256)]),
        "batch64": Workload(batch64, [size(128)] * len(batch64)),
        "batch256": Workload(batch256, [size(256)] * len(batch256)),
        "prefill16x4096": Workload(prefill, [1] * len(prefill)),
        "prefix256": Workload(prefix, [size(64)] * len(prefix), len(shared)),
        "mixed256": Workload(mixed, mixed_new),
        "batch1024": Workload(batch1024, [size(128)] * len(batch1024)),
        "long32": Workload(long, [size(256)] * len(long)),
    }


@dataclass(frozen=True, slots=True)
class Figure:
    """The figure that a workload is judged by. `vllm` and `bar` have the models for which one is
    recorded; "MODEL fp8" means float8 weights.
    """

    label: str
    unit: str  # "new tok/s", "prompt tok/s" or "s"
    vllm: Mapping[str, float]
    bar: Mapping[str, float]

    @property
    def higher_is_better(self) -> bool:
        return self.unit != "s"

    def value(self, workload: Workload, seconds: float) -> float:
        match self.unit:
            case "new tok/s":
                return workload.num_new_tokens / seconds
            case "prompt tok/s":
                return workload.num_prompt_tokens / seconds
        return seconds


# vLLM 0.24.0 (torch 2.11, FlashAttention 3, CUDA graphs, compilation and prefix caching on,
# max_model_len 8192) on one H200 with the lists above: bfloat16, greedy, in process, best of three.
# Its figures for "fp8" weights are those of its server, over HTTP.
FIGURES = {
    "single": Figure(
        "1 x 128 in, 256 out",
        "new tok/s",
        {"llama-1b": 483, "llama-8b": 202, "llama-8b fp8": 300},
        {"llama-1b": 1000, "llama-8b": 242, "llama-8b fp8": 400},
    ),
    "batch64": Figure(
        "64 x 128 in, 128 out",
        "new tok/s",
        {"llama-1b": 17_650, "llama-8b": 8525, "llama-8b fp8": 11_609},
        {"llama-1b": 30_000, "llama-8b": 9600, "llama-8b fp8": 14_500},
    ),
    "batch256": Figure(
        "256 x 512 in, 256 out",
        "new tok/s",
        {"llama-1b": 30_115, "llama-8b": 10_025, "llama-8b fp8": 10_692},
        {"llama-1b": 48_000, "llama-8b": 11_300, "llama-8b fp8": 15_000},
    ),
    "prefill16x4096": Figure(
        "16 x 4,096 in",
        "prompt tok/s",
        {"llama-1b": 243_600, "llama-8b": 41_400},
        {"llama-1b": 260_000, "llama-8b": 43_000},
    ),
    "prefix256": Figure(
        "256 x (2,048 shared + 64) in, 64 out",
        "s",
        {"llama-1b": 0.878, "llama-8b": 1.981},
        {"llama-1b": 0.42, "llama-8b": 1.2},
    ),
    "mixed256": Figure(
        "256 x 32-1,024 in, 16-512 out",
        "new tok/s",
        {"llama-1b": 23_320, "llama-8b": 8633},
        {"llama-1b": 38_000, "llama-8b": 10_000},
    ),
    "batch1024": Figure(
        "1,024 x 128 in, 128 out",
        "new tok/s",
        {"llama-8b fp8": 15_221},
        {"llama-8b fp8": 24_000},
    ),
    "long32": Figure(
        "32 x 7,000 in, 256 out",
        "new tok/s",
        {"llama-8b fp8": 1238},
        {"llama-8b fp8": 1500},
    ),
}
# Process start to first token: import and construction.
START_FIGURES = {
    "cold": Figure(
        "start to first token, no kernel cache",
        "s",
        {"llama-1b": 91, "llama-8b": 83},
        {"llama-1b": 40, "llama-8b": 45},
    ),
    "warm": Figure(
        "start to first token, kernel cache",
        "s",
        {"llama-1b": 71},
        {"llama-1b": 15, "llama-8b": 20},
    ),
}
