"""The Hopper prefill kernel, as far as it can be tested without a GPU, and its work lists.

On a Hopper GPU the examples of `attention_prompts` run it.
"""

import numpy as np
import pytest
import torch

from engine.torch.kernels.attention_spec import _heads, batch_of
from engine.torch.kernels.attention_triton import TritonAttention
from engine.torch.kernels.base import LLAMA_1B, LLAMA_8B, Shape
from engine.torch.kernels.cuda.attention import AttentionConfig, source

SHARED_BYTES = 232_448  # that a block may have of a multiprocessor's memory
CONFIGS = [
    AttentionConfig(64, 4, 8, 16, 0),
    AttentionConfig(128, 4, 8, 16, 0),
    AttentionConfig(128, 7, 4, 32, 4096),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_prefill_tiles_fit_into_shared_memory(config: AttentionConfig) -> None:
    assert config.shared_bytes <= SHARED_BYTES - 256  # barriers


@pytest.mark.parametrize("config", CONFIGS)
def test_generated_cuda_source_contains_both_matmuls(config: AttentionConfig) -> None:
    text = source(config, torch.bfloat16)
    assert f"#define WINDOW {config.window}" in text
    assert "multiply_keys(float (&sums)[64], u64" in text
    assert f"multiply_values(float (&sums)[{config.head_dim // 2}], u32" in text


@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B])
def test_prefill_work_items_are_sorted_by_length(shape: Shape) -> None:
    rows = [(512, 512), (3000, 200), (40, 1), (700, 700)]
    backend = TritonAttention(_heads(shape), block_size=16, dtype=torch.bfloat16)
    step = batch_of(rows, np.zeros((len(rows), 1), np.int32))
    lists, _ = backend.lists(step)
    tiles = lists["tiles"]
    begins = step.seq_lens - np.diff(step.query_start)
    keys = begins[tiles[:, 0]] + tiles[:, 1]
    assert (np.diff(keys) <= 0).all()
    assert 2 not in tiles[:, 0], "a row of one query has no tile"
    for row, (_, queries) in enumerate(rows):
        starts = np.sort(tiles[tiles[:, 0] == row, 1])
        if queries > 1:
            assert starts[0] == 0 and queries - starts[-1] <= np.diff(starts).max()
