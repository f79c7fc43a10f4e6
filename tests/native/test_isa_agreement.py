"""Every instruction set's matmul agrees with the generic one."""

from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from .panels import LAYOUTS, QUANTIZED, random_panels

F32, INT8, INT8_OUTLIERS = 0, 1, 3
# Kernel set -> the one whose INT8 results it has, bit for bit.
SAME_BITS = {
    "avx_vnni": "avx2",
    "avx512_bf16": "avx512",
    "amx": "avx512",
    "i8mm": "neon",
    "neon_bf16": "neon",
}
SHAPES = [(16, 32, 1), (48, 576, 5), (21, 100, 3), (130, 33, 9), (64, 1536, 1), (33, 250, 18)]


def product(
    native: ModuleType,
    isa: str,
    numerics: int,
    layout: str,
    weights: NDArray[np.uint8],
    rows: int,
    x: NDArray[np.float32],
) -> NDArray[np.float32]:
    number = LAYOUTS.index(layout)
    result: NDArray[np.float32] = native.matmul(
        isa, numerics, number, weights, rows, x.shape[1], x, None, 0, False, None
    )
    return result


def outliers(rng: np.random.Generator, tokens: int, columns: int) -> NDArray[np.float32]:
    """Activations of which one in fifty is thirty times as large."""
    x = rng.normal(0, 1, (tokens, columns)) * rng.choice([1, 30], (tokens, columns), p=[0.98, 0.02])
    return x.astype(np.float32)


@pytest.mark.parametrize("layout", QUANTIZED)
@pytest.mark.parametrize(("rows", "columns", "tokens"), SHAPES)
def test_int8_matmul_agrees_across_instruction_sets(
    native: ModuleType, isa: str, layout: str, rows: int, columns: int, tokens: int
) -> None:
    rng = np.random.default_rng(rows + columns)
    weights, dense = random_panels(rng, layout, rows, columns)
    x = outliers(rng, tokens, columns)
    want = product(native, "generic", INT8, layout, weights, rows, x)
    got = product(native, isa, INT8, layout, weights, rows, x)
    # Dot products of groups are exact; what differs is the rounding of the float sums over them.
    magnitude = np.abs(x) @ np.abs(dense).T
    assert (np.abs(got - want) <= 1e-6 * magnitude + 1e-6).all()


@pytest.mark.parametrize("layout", QUANTIZED)
@pytest.mark.parametrize("tokens", [1, 5, 12, 16, 27, 35])
@pytest.mark.parametrize("columns", [64, 200, 250])
def test_isas_with_the_same_arithmetic_have_the_same_bits(
    native: ModuleType, isa: str, layout: str, tokens: int, columns: int
) -> None:
    """They differ in how they compute the exact dot products, and in nothing else. AMX tiles are
    used for 16 tokens, and if the number of groups is even.
    """
    family = SAME_BITS.get(isa, isa)
    rng = np.random.default_rng(tokens)
    weights, _ = random_panels(rng, layout, 48, columns)
    x = outliers(rng, tokens, columns)
    for numerics in (INT8, INT8_OUTLIERS):
        want = product(native, family, numerics, layout, weights, 48, x)
        got = product(native, isa, numerics, layout, weights, 48, x)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layout", QUANTIZED)
def test_int8_extremes_do_not_saturate(native: ModuleType, isa: str, layout: str) -> None:
    rng = np.random.default_rng(1)
    weights, dense = random_panels(rng, layout, 16, 64)
    body = {"Q4": 256, "Q4G16": 256}.get(layout, 512)
    stride = weights.size // 2 if layout != "Q8" else 512
    for byte in (0, 255):
        for group in range(2):
            weights[group * stride : group * stride + body] = byte
        for sign in (1, -1):
            x = np.full((5, 64), sign, np.float32)
            want = product(native, "generic", F32, layout, weights, 16, x)
            got = product(native, isa, INT8, layout, weights, 16, x)
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns", "tokens"), SHAPES)
def test_f32_matmul_agrees_across_instruction_sets(
    native: ModuleType, isa: str, layout: str, rows: int, columns: int, tokens: int
) -> None:
    rng = np.random.default_rng(rows * columns)
    weights, dense = random_panels(rng, layout, rows, columns)
    x = outliers(rng, tokens, columns)
    want = product(native, "generic", F32, layout, weights, rows, x)
    got = product(native, isa, F32, layout, weights, rows, x)
    magnitude = np.abs(x) @ np.abs(dense).T
    assert (np.abs(got - want) <= 1e-6 * magnitude + 1e-6).all()
    assert (np.abs(got - x.astype(np.float64) @ dense.T) <= 1e-6 * magnitude + 1e-6).all()


@pytest.mark.parametrize("numerics", [F32, INT8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("layout", QUANTIZED)
def test_nan_and_infinity_in_matmul_input_affect_only_their_row(
    native: ModuleType, isa: str, numerics: int, bad: float, layout: str
) -> None:
    rng = np.random.default_rng(2)
    weights, _ = random_panels(rng, layout, 32, 96)
    x = outliers(rng, 6, 96)
    clean = product(native, isa, numerics, layout, weights, 32, x)
    x[3, 40] = bad
    got = product(native, isa, numerics, layout, weights, 32, x)
    assert not np.isfinite(got[3]).any()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(clean, 3, 0))
