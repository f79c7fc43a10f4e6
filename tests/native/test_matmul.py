"""Matmul of every instruction set against numpy, over layouts, shapes and epilogues."""

from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.ir import reference

from .panels import LAYOUTS, QUANTIZED, ROWS, aligned, random_panels

F32, INT8, BF16, INT8_OUTLIERS = range(4)
ACTIVATIONS = tuple(reference.ACTIVATIONS.values())  # in the order of their codes
SWIGLU_OAI = len(ACTIVATIONS)  # the code after those of one argument
# Errors relative to the sum of the terms' sizes.
TOLERANCE = {F32: 1e-6, INT8: 1.2e-2, BF16: 6e-3, INT8_OUTLIERS: 1.2e-2}
SHAPES = [(16, 32, 1), (7, 33, 2), (33, 70, 12), (48, 576, 5), (100, 100, 13), (64, 1536, 40)]

Floats = NDArray[np.float32]
Packed = NDArray[np.uint8]


def numerics_of(native: ModuleType, isa: str, layout: str) -> list[int]:
    """What an instruction set offers for a layout."""
    quantized = [INT8, INT8_OUTLIERS] if layout in QUANTIZED else []
    return [F32, *quantized, *([BF16] if native.has_bf16(isa) else [])]


def matmul(
    native: ModuleType,
    isa: str,
    numerics: int,
    layout: str,
    weights: Packed,
    rows: int,
    x: Floats,
    bias: Floats | None = None,
    activation: int = 0,
    gated: bool = False,
    residual: Floats | None = None,
) -> Floats:
    result: Floats = native.matmul(
        isa,
        numerics,
        LAYOUTS.index(layout),
        weights,
        rows,
        x.shape[1],
        x,
        bias,
        activation,
        gated,
        residual,
    )
    return result


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.normal(0, 1, shape).astype(np.float32)


def assert_close(got: Floats, want: Floats, size: Floats, numerics: int) -> None:
    """Every value within the tolerance, and for 8-bit activations their root mean square too."""
    assert got.shape == want.shape
    assert (np.abs(got - want) <= TOLERANCE[numerics] * size).all()
    if numerics in (INT8, INT8_OUTLIERS):
        assert np.sqrt(np.mean((got - want) ** 2)) < 0.012 * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns", "tokens"), SHAPES)
def test_matmul_matches_numpy(
    native: ModuleType, isa: str, layout: str, rows: int, columns: int, tokens: int
) -> None:
    rng = np.random.default_rng(rows * columns)
    weights, dense = random_panels(rng, layout, rows, columns)
    x = normal(rng, tokens, columns)
    want, size = reference.linear(x, dense), np.abs(x) @ np.abs(dense).T
    for numerics in numerics_of(native, isa, layout):
        got = matmul(native, isa, numerics, layout, weights, rows, x)
        assert_close(got, want, size, numerics)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_a_matmul_does_not_depend_on_the_other_rows(
    native: ModuleType, isa: str, layout: str
) -> None:
    rng = np.random.default_rng(7)
    rows, columns = 40, 160
    weights, _ = random_panels(rng, layout, rows, columns)
    x = normal(rng, 140, columns)
    for numerics in numerics_of(native, isa, layout):
        alone = np.concatenate(
            [matmul(native, isa, numerics, layout, weights, rows, row[None]) for row in x]
        )
        for tokens in [*range(2, 41), 70, 140]:
            start = tokens * 5 % (140 - tokens + 1)
            part = np.ascontiguousarray(x[start : start + tokens])
            together = matmul(native, isa, numerics, layout, weights, rows, part)
            np.testing.assert_array_equal(together, alone[start : start + tokens])


def quantized_input(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """(T, groups, 32) whole numbers and their (T, groups) scales, of 22 bits."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2)
    inverse = np.float32(127) / largest
    scales = ((largest / np.float32(127)).view(np.uint32) & ~np.uint32(3)).view(np.float32)
    return np.rint(groups * inverse[..., None]).astype(np.int64), scales


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once but for cases as rare as one in 2 ** 40."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def emulated_int8(x: Floats, weights: Packed, rows: int, layout: str) -> Floats:
    """The arithmetic of the AVX-512 kernels for Q4 and Q8, step by step."""
    tokens, columns = x.shape
    groups, values = columns // 32, 16 if layout == "Q4" else 32
    panels = weights.reshape(rows // ROWS, -1)
    size = 320 if layout == "Q4" else 512
    body = panels[:, : groups * size].reshape(-1, groups, size)
    quads = body[..., : values * ROWS].reshape(-1, groups, values // 4, ROWS, 4)
    stored = quads.transpose(0, 3, 1, 2, 4).reshape(rows, groups, values).astype(np.int64)
    if layout == "Q4":
        stored = np.concatenate((stored & 15, stored >> 4), axis=2)
        halves = np.ascontiguousarray(body[..., 256:]).view(np.float16).reshape(-1, groups, 2, ROWS)
        scales, minima = halves.transpose(2, 0, 3, 1).reshape(2, rows, groups).astype(np.float32)
    else:
        tail = np.ascontiguousarray(panels[:, groups * size :]).view(np.float16)
        halves = tail[:, : groups * ROWS].reshape(-1, groups, ROWS)
        scales = halves.swapaxes(1, 2).reshape(rows, groups).astype(np.float32)
        minima = scales * np.float32(-128)
    whole, input_scales = quantized_input(x)
    result = np.zeros((tokens, rows), np.float32)
    for g in range(groups):
        dots = (whole[:, g] @ stored[:, g].T).astype(np.float32)
        sums = whole[:, g].sum(axis=1).astype(np.float32) * input_scales[:, g]
        result = fma(dots * input_scales[:, g, None], scales[:, g], result)
        result = fma(sums[:, None], minima[:, g], result)
    return result


@pytest.mark.parametrize("layout", ["Q4", "Q8"])
@pytest.mark.parametrize("tokens", [1, 11, 30])
def test_int8_matmul_matches_emulated_integer_arithmetic(
    native: ModuleType, isa: str, layout: str, tokens: int
) -> None:
    rng = np.random.default_rng(tokens)
    weights, dense = random_panels(rng, layout, 64, 576)
    x = normal(rng, tokens, 576)
    want = emulated_int8(x, weights, 64, layout)
    got = matmul(native, isa, INT8, layout, weights, 64, x)
    if isa in ("avx512", "avx512_bf16", "amx"):
        np.testing.assert_array_equal(got, want)
    else:  # the order of the float operations is their own
        assert (np.abs(got - want) <= 1e-6 * (np.abs(x) @ np.abs(dense).T)).all()


def outliers_of(x: Floats) -> NDArray[np.bool_]:
    """Where a value has more than half of the sum of squares of its 32."""
    squares = (x * x).reshape(len(x), -1, 32)
    found: NDArray[np.bool_] = (squares > 0.5 * squares.sum(axis=2, keepdims=True)).reshape(x.shape)
    return found


@pytest.mark.parametrize("layout", QUANTIZED)
@pytest.mark.parametrize(("gated", "tokens"), [(False, 1), (False, 30), (True, 14)])
def test_outlier_activations_are_multiplied_in_float(
    native: ModuleType, isa: str, layout: str, gated: bool, tokens: int
) -> None:
    """The quantized rest has the result that INT8 gives it, and the outliers that of float."""
    rng = np.random.default_rng(tokens)
    weights, dense = random_panels(rng, layout, 64, 192)
    x = normal(rng, tokens, 192)
    columns = np.concatenate(
        (rng.integers(0, 32, (tokens, 3)) + [0, 32, 160], [[7, 39, 71]] * tokens), 1
    )
    np.put_along_axis(x, columns, 40 * normal(rng, tokens, 6), axis=1)
    found = outliers_of(x)
    assert 2 * tokens < found.sum() < 6 * tokens
    rest = matmul(native, isa, INT8, layout, weights, 64, np.where(found, np.float32(0), x))
    want = rest + np.where(found, x, 0) @ dense.T
    if gated:
        gate, up = (want.reshape(tokens, 2, 2, ROWS)[:, :, i].reshape(tokens, 32) for i in range(2))
        want = gate * up
    got = matmul(native, isa, INT8_OUTLIERS, layout, weights, 64, x, None, 0, gated)
    size = np.abs(x) @ np.abs(dense).T
    limit = 3e-6 * (size.max(axis=1, keepdims=True) ** 2 if gated else size)
    assert (np.abs(got - want) <= limit).all()


@pytest.mark.parametrize("layout", QUANTIZED)
@pytest.mark.parametrize("numerics", [INT8, INT8_OUTLIERS])
def test_int8_matmul_of_zeros_subnormals_and_nonfinite_rows(
    native: ModuleType, isa: str, layout: str, numerics: int
) -> None:
    rng = np.random.default_rng(3)
    weights, _ = random_panels(rng, layout, 16, 64)
    x = np.zeros((4, 64), np.float32)
    x[1], x[2, 40], x[3, 5] = 1e-40, np.nan, np.inf
    got = matmul(native, isa, numerics, layout, weights, 16, x)
    assert (got[0] == 0).all()
    assert (np.abs(got[1]) < 1e-30).all()
    assert not np.isfinite(got[2:]).any()


@pytest.mark.parametrize("rows", [5, 16, 49])
@pytest.mark.parametrize("tokens", [1, 14])
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
def test_matmul_epilogues_apply_bias_activation_and_residual(
    native: ModuleType, isa: str, rows: int, tokens: int, activation: int
) -> None:
    rng = np.random.default_rng(rows + tokens)
    x, bias = normal(rng, tokens, 96), normal(rng, rows)
    residual = normal(rng, tokens, rows)
    for layout in ("Q4", "Q8", "F16"):
        weights, dense = random_panels(rng, layout, rows, 96, spread=0.3)
        size = np.abs(x) @ np.abs(dense).T + np.abs(bias) + np.abs(residual) + 1
        squares = ACTIVATIONS[activation] is reference.relu2
        size = size * size if squares else size
        want = ACTIVATIONS[activation](reference.linear(x, dense, bias))
        # A square doubles the relative error, so only float arithmetic is near enough.
        for numerics in [F32] if squares else numerics_of(native, isa, layout):
            call = (native, isa, numerics, layout, weights, rows, x, bias, activation)
            assert_close(matmul(*call), want, size, numerics)
            got = matmul(*call, residual=residual)
            assert_close(got, want + residual, size, numerics)


def interleaved(gate: Packed, up: Packed, panels: int) -> Packed:
    """The panels of two matrices in turns."""
    pairs = np.stack((gate.reshape(panels, -1), up.reshape(panels, -1)), axis=1)
    return aligned(pairs.ravel())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("width", "tokens"), [(16, 1), (20, 3), (64, 26)])
def test_gated_matmul_matches_numpy(
    native: ModuleType, isa: str, layout: str, width: int, tokens: int
) -> None:
    rng = np.random.default_rng(width)
    panels = -(-width // ROWS)
    gate, gate_dense = random_panels(rng, layout, width, 64)
    up, up_dense = random_panels(rng, layout, width, 64)
    weights = interleaved(gate, up, panels)
    x, residual = normal(rng, tokens, 64), normal(rng, tokens, width)
    bias = np.zeros((2, panels * ROWS), np.float32)
    bias[:, :width] = normal(rng, 2, width)
    in_panels = np.ascontiguousarray(bias.reshape(2, panels, ROWS).swapaxes(0, 1)).ravel()
    gates = reference.linear(x, gate_dense, bias[0, :width])
    ups = reference.linear(x, up_dense, bias[1, :width])
    products = {1: reference.silu(gates) * ups, SWIGLU_OAI: reference.swiglu_oai(gates, ups)}
    gate_size = np.abs(x) @ np.abs(gate_dense).T + np.abs(bias[0, :width])
    up_size = np.abs(x) @ np.abs(up_dense).T + np.abs(bias[1, :width])
    size = 2 * (gate_size * up_size + gate_size + up_size + np.abs(residual))
    for numerics in numerics_of(native, isa, layout):
        call = (native, isa, numerics, layout, weights, 2 * width, x, in_panels)
        for activation, product in products.items():
            got = matmul(*call, activation, True, residual)
            assert_close(got, product + residual, size, numerics)


def test_invalid_matmul_arguments_are_refused(native: ModuleType, isa: str) -> None:
    weights, _ = random_panels(np.random.default_rng(0), "Q4", 16, 64)
    x = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="too short"):
        matmul(native, isa, F32, "Q4", weights, 17, x)
    with pytest.raises(ValueError, match="columns"):
        native.matmul(isa, F32, 0, weights, 16, 32, x, None, 0, False, None)
    with pytest.raises(ValueError, match="no instruction set"):
        matmul(native, "abacus", F32, "Q4", weights, 16, x)
