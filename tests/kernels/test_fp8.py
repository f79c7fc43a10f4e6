"""Float8 activations and float8 caches: what the comparison of each kernel with its reference does
not show.
"""

import pytest
import torch

from engine.torch.kernels.base import TINY, Inputs, copied
from engine.torch.kernels.fp8 import (
    FP8,
    add_rms_norm_rows,
    cache_scales,
    gated_rows,
    quantize_rows,
    random_cache,
    read_cache,
)
from engine.torch.kernels.rope import rope_write

SLOTS = torch.tensor([3, 9, 4, 0])


def inputs_on(device: torch.device) -> Inputs:
    return Inputs(device, torch.float16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_survive_float8_quantization(bad: float, device: torch.device) -> None:
    x = inputs_on(device).normal(3, 2 * TINY.inner_size)
    x[1, 5] = bad
    weight = torch.ones(x.shape[1], device=device, dtype=x.dtype)
    for rows in (
        quantize_rows(x),
        add_rms_norm_rows(x, torch.zeros_like(x), weight, 1e-5)[0],
        gated_rows(x, "silu") if bad != float("-inf") else quantize_rows(x),  # silu(-inf) is 0
    ):
        dense = rows.values.float() * rows.scales
        assert dense.isfinite().all(dim=1).tolist() == [True, False, True]


def test_rounding_is_to_nearest_even(device: torch.device) -> None:
    """The row has every float8 number, and the middle between each two of them."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, -numbers, middles, -middles)).to(device)[None]
    rows = quantize_rows(x)
    assert rows.scales.item() == 1
    torch.testing.assert_close(rows.values.float(), x.to(FP8).float(), rtol=0, atol=0)


def test_keys_and_values_are_written_with_a_scale_per_head(device: torch.device) -> None:
    inputs, slots = inputs_on(device), SLOTS.to(device)
    heads, kv_heads, width = TINY.num_heads, TINY.num_kv_heads, TINY.head_dim
    cache = random_cache(inputs, 3, TINY)
    before = read_cache(cache, torch.float32, torch.arange(3, device=device)).flatten(0, 1)
    qkv = inputs.normal(len(slots), TINY.qkv_size)
    qkv[:, -width:] *= 1000  # the values of the last head
    angles = torch.zeros(8, width // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)  # turns nothing
    positions = torch.arange(len(slots), device=device)
    rope_write(qkv, positions, table, slots, cache, heads, kv_heads, width)
    after = read_cache(cache, torch.float32, torch.arange(3, device=device)).flatten(0, 1)
    written = qkv[:, heads * width :].float().view(len(slots), 2, kv_heads, width)
    largest = written.abs().amax(dim=-1, keepdim=True)
    assert ((after[slots] - written).abs() <= largest / 24).all()
    others = torch.ones(len(after), dtype=torch.bool, device=device)
    others[slots] = False
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=0)


def test_float8_cache_scales_are_stored_behind_the_values(device: torch.device) -> None:
    cache = random_cache(inputs_on(device), 2, TINY)
    assert cache_scales(cache).shape == cache.shape[:-1]
    torch.testing.assert_close(cache_scales(copied(cache)), cache_scales(cache), rtol=0, atol=0)
    largest = cache.float().abs().amax(dim=-1)
    assert (largest == 448).all(), "each scale maps the largest value of a head to 448"
