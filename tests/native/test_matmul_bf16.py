"""bfloat16 matmul of every instruction set against float64 over the dequantized weights."""

from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.ir import reference

from .conftest import load_native
from .panels import LAYOUTS, random_panels

BF16 = 2
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh")
SHAPES = [(16, 32, 1), (33, 70, 5), (96, 576, 33), (31, 31, 16), (177, 160, 64), (8, 1, 17)]

F32 = NDArray[np.float32]


_NATIVE = load_native()
_WITH_BF16 = [name for name in _NATIVE.instruction_sets() if _NATIVE.has_bf16(name)]
if not _WITH_BF16:
    pytest.skip("this CPU does not multiply bfloat16", allow_module_level=True)


@pytest.fixture(params=_WITH_BF16)
def bf16_isa(request: pytest.FixtureRequest) -> str:
    return request.param


def multiply(
    native: ModuleType,
    isa: str,
    layout: str,
    packed: NDArray[np.uint8],
    rows: int,
    x: F32,
    bias: F32 | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: F32 | None = None,
) -> F32:
    return native.matmul(
        isa,
        BF16,
        LAYOUTS.index(layout),
        packed,
        rows,
        x.shape[1],
        x,
        bias,
        ACTIVATIONS.index(activation),
        gated,
        residual,
    )


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.normal(0, 1, shape).astype(np.float32)


def activated(activation: str, x: NDArray[np.float64]) -> F32:
    values = x.astype(np.float32)
    return values if activation == "none" else getattr(reference, activation)(values)


def relative_rms(actual: NDArray, expected: NDArray) -> float:
    return float(np.sqrt(np.mean(np.square(actual - expected)) / np.mean(np.square(expected))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows, columns, tokens", SHAPES)
def test_product_is_within_bfloat16_rounding(
    native: ModuleType, bf16_isa: str, layout: str, rows: int, columns: int, tokens: int
) -> None:
    """Each product's error is at most the sum of its terms' roundings, 2^-8 for each factor."""
    rng = np.random.default_rng(rows + columns + tokens)
    packed, weight = random_panels(rng, layout, rows, columns)
    x = normal(rng, tokens, columns)
    out = multiply(native, bf16_isa, layout, packed, rows, x)
    wide = x.astype(np.float64) @ weight.T.astype(np.float64)
    bound = np.abs(x) @ np.abs(weight.T) * 2**-6.98 + 1e-6
    assert out.shape == (tokens, rows)
    assert np.all(np.abs(out - wide) <= bound)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_error_is_small_and_unbiased(native: ModuleType, bf16_isa: str, layout: str) -> None:
    """0.4 % relative RMS; the weights' rounding shifts sums by 0.03 % of their terms at most."""
    rng = np.random.default_rng(7)
    rows, columns, tokens = 256, 1536, 48
    packed, weight = random_panels(rng, layout, rows, columns)
    x = normal(rng, tokens, columns)
    out = multiply(native, bf16_isa, layout, packed, rows, x)
    assert relative_rms(out, x.astype(np.float64) @ weight.T.astype(np.float64)) <= 0.004

    ones = np.ones((1, columns), np.float32)
    sums = multiply(native, bf16_isa, layout, packed, rows, ones)[0]
    total = float(np.abs(weight).sum(dtype=np.float64))
    error = sums.astype(np.float64) - weight.sum(axis=1, dtype=np.float64)
    assert abs(error.sum()) <= 3e-4 * total
    signed = multiply(native, bf16_isa, layout, packed, rows, np.sign(weight[:64]))
    growth = np.diagonal(signed).astype(np.float64) - np.abs(weight[:64]).sum(axis=1, dtype=float)
    assert abs(growth.sum()) <= 3e-4 * float(np.abs(weight[:64]).sum(dtype=np.float64))


@pytest.mark.parametrize("layout", ["Q4", "Q8", "BF16"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_a_bf16_matmul_is_bit_identical_alone_and_batched(
    native: ModuleType, bf16_isa: str, layout: str, gated: bool
) -> None:
    """Bit by bit, wherever the row sits and whatever is beside it."""
    rng = np.random.default_rng(11)
    rows, columns = 96, 200
    packed, _ = random_panels(rng, layout, rows, columns)
    x = normal(rng, 65, columns)
    x[13] = np.inf

    def product(values: F32) -> F32:
        return multiply(native, bf16_isa, layout, packed, rows, values, None, "silu", gated)

    alone = np.concatenate([product(x[i : i + 1]) for i in range(len(x))])
    for first, last in [(0, 65), (0, 2), (1, 17), (14, 30), (30, 63), (48, 64), (64, 65)]:
        np.testing.assert_array_equal(product(x[first:last]), alone[first:last])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("rows, tokens", [(48, 35), (61, 16), (17, 1)])
def test_bf16_matmul_epilogues_apply_bias_activation_and_residual(
    native: ModuleType,
    bf16_isa: str,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    rows: int,
    tokens: int,
) -> None:
    rng = np.random.default_rng(rows)
    packed, weight = random_panels(rng, "Q4", rows, 96, spread=0.2)
    x = normal(rng, tokens, 96)
    plain = multiply(native, bf16_isa, "Q4", packed, rows, x)
    bias = normal(rng, rows) if has_bias else None
    residual = normal(rng, tokens, rows) if has_residual else None
    out = multiply(native, bf16_isa, "Q4", packed, rows, x, bias, activation, False, residual)
    expected = activated(activation, plain + (0 if bias is None else bias))
    expected = expected + (0 if residual is None else residual)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width, tokens", [(16, 1), (40, 19), (21, 33), (64, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bf16_gated_matmul_matches_the_reference(
    native: ModuleType, bf16_isa: str, activation: str, width: int, tokens: int, has_bias: bool
) -> None:
    rng = np.random.default_rng(width)
    panels = 2 * -(-width // 16)
    packed, weight = random_panels(rng, "Q4", panels * 16, 96, spread=0.2)
    x = normal(rng, tokens, 96)
    bias = normal(rng, panels * 16) if has_bias else None
    residual = normal(rng, tokens, width)
    plain = multiply(native, bf16_isa, "Q4", packed, panels * 16, x)
    plain = (plain + (0 if bias is None else bias)).reshape(tokens, panels // 2, 2, 16)
    gate, up = (plain[:, :, half].reshape(tokens, -1)[:, :width] for half in (0, 1))
    out = multiply(native, bf16_isa, "Q4", packed, 2 * width, x, bias, activation, True, residual)
    expected = activated(activation, gate) * up + residual
    np.testing.assert_allclose(out, expected, rtol=4e-6, atol=4e-6)
