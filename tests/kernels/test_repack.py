"""Repacked GGUF weights dequantize to what `weights/quants.py` gives, up to float16 scales."""

import numpy as np
import pytest
import torch

from engine.torch.kernels.quantized import dequantize
from engine.torch.kernels.repack import REPACKED, packed_bits, repack
from engine.weights.quants import TRAITS, kernel_type
from engine.weights.quants import dequantize as decode

SHAPE = (6, 512)
# Where each type keeps its factors: random bytes there could be infinite.
FACTORS = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_G16": (0, 2, 4, 6),
    "Q8_G16": (0, 2),
}
# Their levels are not evenly spaced.
UNEVEN = ("IQ4_NL", "IQ4_XS", "MXFP4")


def stored(name: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    traits = TRAITS[name]
    count = SHAPE[0] * SHAPE[1] // traits.block_elems
    blocks = rng.integers(0, 256, (count, traits.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 130, count)
        return blocks.reshape(-1)
    for offset in FACTORS.get(name, (0,)):
        factors = rng.uniform(0.001, 0.01, (count, 1)).astype("<f2")
        blocks[:, offset : offset + 2] = factors.view(np.uint8)
    return blocks.reshape(-1)


def test_every_quantized_type_can_be_repacked() -> None:
    quantized = {name for name, traits in TRAITS.items() if traits.quantized}
    assert set(REPACKED) == {kernel_type(name) for name in quantized}


@pytest.mark.parametrize("name", sorted(REPACKED))
def test_a_repacked_matrix_dequantizes_to_its_values(name: str, device: torch.device) -> None:
    raw = stored(name)
    expected = torch.from_numpy(decode(name, raw, SHAPE)).to(device)
    weight = repack(name, torch.from_numpy(raw).to(device), SHAPE)
    assert weight.shape == SHAPE
    # A product of two halves keeps 11 bits.
    largest = expected.abs().max()
    torch.testing.assert_close(
        dequantize(weight, torch.float32), expected, rtol=2**-10, atol=float(largest) * 2**-9
    )
    if TRAITS[name].block_bytes * 8 < 5.1 * TRAITS[name].block_elems and name not in UNEVEN:
        assert weight.bits == 4


@pytest.mark.parametrize("name", sorted(REPACKED))
def test_the_memory_plan_knows_the_size_of_a_repacked_matrix(name: str) -> None:
    weight = repack(name, torch.from_numpy(stored(name)), SHAPE)
    assert weight.nbytes == SHAPE[0] * SHAPE[1] * packed_bits(name) / 8
