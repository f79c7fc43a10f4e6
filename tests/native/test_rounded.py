"""Per-channel int8 matmul: the requantized weights, then the arithmetic."""

from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.ir import reference

from .conftest import load_native
from .panels import LAYOUTS, ROWS, aligned, random_panels

I8, INT8_PER_CHANNEL = 8, 4
TILE_COLUMNS = 64
ACTIVATIONS = (lambda x: x, reference.silu, reference.gelu, reference.gelu_tanh)
# Integer dot products are exact; converting them to float and scaling is not.
TOLERANCE = 5e-7
SHAPES = [(16, 64, 16), (7, 33, 2), (33, 70, 17), (48, 576, 32), (100, 100, 13), (80, 1536, 49)]

Floats = NDArray[np.float32]
Packed = NDArray[np.uint8]

_NATIVE = load_native()


@pytest.fixture(
    params=[each for each in _NATIVE.instruction_sets() if _NATIVE.has_per_channel(each)]
)
def per_channel_isa(request: pytest.FixtureRequest) -> str:
    return request.param


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.normal(0, 1, shape).astype(np.float32)


def with_outliers(x: Floats) -> Floats:
    x[:, :: x.shape[1] // 2] *= 40
    return x


def multiply(
    native: ModuleType,
    isa: str,
    weights: Packed,
    rows: int,
    x: Floats,
    bias: Floats | None = None,
    activation: int = 0,
    gated: bool = False,
    residual: Floats | None = None,
) -> Floats:
    result: Floats = native.matmul(
        isa, INT8_PER_CHANNEL, I8, weights, rows, x.shape[1], x, bias, activation, gated, residual
    )
    return result


def copied(
    native: ModuleType, isa: str, rng: np.random.Generator, layout: str, rows: int, columns: int
) -> tuple[Packed, Floats]:
    """A random matrix requantized, and the dequantized matrix."""
    weights, dense = random_panels(rng, layout, rows, columns)
    return native.requantize(isa, LAYOUTS.index(layout), weights, rows, columns), dense


def unpacked(weights: Packed, rows: int, columns: int) -> tuple[NDArray[np.int64], Floats]:
    """The (rows, columns) integers without padding, and one scale per row."""
    tiles = -(-columns // TILE_COLUMNS)
    panels = weights.reshape(-(-rows // ROWS), -1)
    size = tiles * TILE_COLUMNS * ROWS
    fours = panels[:, :size].view(np.int8).reshape(len(panels), tiles * 16, ROWS, 4)
    values = fours.swapaxes(1, 2).reshape(len(panels) * ROWS, tiles * TILE_COLUMNS)
    scales = np.ascontiguousarray(panels[:, size:]).view(np.float32).reshape(-1)
    assert not values[rows:].any() and not values[:, columns:].any()
    return values[:rows, :columns].astype(np.int64), scales[:rows]


def hadamard(x: Floats) -> Floats:
    """The Hadamard rotation of each 64 columns, butterflies in the order of the kernels."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % TILE_COLUMNS)))
    for apart in (1, 2, 4, 8, 16, 32):
        one, other = np.moveaxis(x.reshape(len(x), -1, 2, apart), 2, 0)
        x = np.stack((one + other, one - other), axis=2).reshape(x.shape)
    return x


def expected(x: Floats, weights: Packed, rows: int) -> tuple[NDArray, NDArray]:
    """The matmul in float64, and its magnitude."""
    x = hadamard(x)
    values, scales = unpacked(weights, rows, x.shape[1])
    absmax = np.abs(x).max(axis=1, keepdims=True)
    quantized = np.rint(x * (np.float32(127) / absmax)).astype(np.int64)
    product = quantized @ values.T * ((absmax / np.float32(127)).astype(np.float64) * scales)
    return product, np.abs(product)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (33, 70), (7, 33), (48, 576)])
def test_requantized_weights_are_off_by_half_a_step_at_most(
    native: ModuleType, per_channel_isa: str, layout: str, rows: int, columns: int
) -> None:
    rng = np.random.default_rng(rows)
    weights, dense = copied(native, per_channel_isa, rng, layout, rows, columns)
    dense = hadamard(dense) / np.float32(TILE_COLUMNS)
    values, scales = unpacked(weights, rows, dense.shape[1])
    np.testing.assert_allclose(scales, np.abs(dense).max(axis=1) / 127, rtol=1e-6)
    error = np.abs(dense - values * scales[:, None].astype(np.float64))
    assert (error <= 0.50001 * scales[:, None]).all()


@pytest.mark.parametrize(("rows", "columns", "tokens"), SHAPES)
def test_per_channel_int8_matmul_matches_its_definition(
    native: ModuleType, per_channel_isa: str, rows: int, columns: int, tokens: int
) -> None:
    rng = np.random.default_rng(rows * columns)
    weights, dense = copied(native, per_channel_isa, rng, "Q4", rows, columns)
    x = with_outliers(normal(rng, tokens, columns))
    want, size = expected(x, weights, rows)
    got = multiply(native, per_channel_isa, weights, rows, x)
    assert (np.abs(got - want) <= TOLERANCE * size).all()
    exact = x.astype(np.float64) @ dense.T
    assert np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) < 0.02


@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("activation", range(4))
def test_per_channel_int8_epilogues_apply_bias_activation_and_residual(
    native: ModuleType, per_channel_isa: str, tokens: int, activation: int
) -> None:
    rng = np.random.default_rng(tokens)
    for rows in (5, 16, 49):
        weights, _ = copied(native, per_channel_isa, rng, "Q8", rows, 96)
        x, bias, residual = normal(rng, tokens, 96), normal(rng, rows), normal(rng, tokens, rows)
        sums, size = expected(x, weights, rows)
        want = ACTIVATIONS[activation]((sums + bias).astype(np.float32)) + residual
        got = multiply(
            native, per_channel_isa, weights, rows, x, bias, activation, residual=residual
        )
        assert (np.abs(got - want) <= 2e-6 * (size + np.abs(bias) + np.abs(residual) + 1)).all()


@pytest.mark.parametrize(("width", "tokens"), [(16, 1), (20, 19), (64, 50)])
def test_per_channel_int8_gated_matmul_matches_its_definition(
    native: ModuleType, per_channel_isa: str, width: int, tokens: int
) -> None:
    rng = np.random.default_rng(width)
    panels = -(-width // ROWS)
    gate, up = (random_panels(rng, "Q4", width, 160)[0] for _ in range(2))
    pairs = aligned(np.stack((gate.reshape(panels, -1), up.reshape(panels, -1)), axis=1).ravel())
    weights = native.requantize(per_channel_isa, LAYOUTS.index("Q4"), pairs, 2 * width, 160)
    in_turns = weights.reshape(panels, 2, -1)
    x = normal(rng, tokens, 160)
    (gates, gate_size), (ups, up_size) = (
        expected(x, np.ascontiguousarray(in_turns[:, i]).ravel(), width) for i in range(2)
    )
    want = reference.silu(gates.astype(np.float32)) * ups
    got = multiply(native, per_channel_isa, weights, 2 * width, x, None, 1, True)
    assert (np.abs(got - want) <= 4e-6 * (gate_size * up_size + gate_size + up_size)).all()


def test_a_row_of_a_per_channel_matmul_does_not_depend_on_the_other_rows(
    native: ModuleType, per_channel_isa: str
) -> None:
    rng = np.random.default_rng(7)
    weights, _ = copied(native, per_channel_isa, rng, "Q4", 40, 160)
    x = normal(rng, 140, 160)
    alone = np.concatenate([multiply(native, per_channel_isa, weights, 40, row[None]) for row in x])
    for tokens in [*range(2, 41), 70, 140]:
        start = tokens * 5 % (140 - tokens + 1)
        part = np.ascontiguousarray(x[start : start + tokens])
        together = multiply(native, per_channel_isa, weights, 40, part)
        np.testing.assert_array_equal(together, alone[start : start + tokens])


def test_per_channel_matmul_of_zeros_subnormals_and_nonfinite_rows(
    native: ModuleType, per_channel_isa: str
) -> None:
    weights, _ = copied(native, per_channel_isa, np.random.default_rng(3), "Q4", 16, 64)
    x = np.zeros((4, 64), np.float32)
    x[1], x[2, 40], x[3, 5] = 1e-40, np.nan, np.inf
    got = multiply(native, per_channel_isa, weights, 16, x)
    assert not got[:2].any()
    assert not np.isfinite(got[2:]).any()


def test_other_numerics_refuse_requantized_weights(
    native: ModuleType, per_channel_isa: str
) -> None:
    weights, _ = copied(native, per_channel_isa, np.random.default_rng(0), "Q4", 16, 64)
    x = np.zeros((1, 64), np.float32)
    for numerics, layout in ((0, I8), (1, I8), (INT8_PER_CHANNEL, 0)):
        with pytest.raises(ValueError, match="do not read"):
            native.matmul(
                per_channel_isa, numerics, layout, weights, 16, 64, x, None, 0, False, None
            )
