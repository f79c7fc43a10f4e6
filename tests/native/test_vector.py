"""Embedding, norms, RoPE and the sampler's vocabulary scans, in every instruction set."""

import math
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.ir import reference

from .panels import LAYOUTS, random_panels

SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 576, 1000, 4099)


def unaligned(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A copy that begins four bytes off any vector's boundary and is followed by NaN."""
    room = np.full(values.size + 32, np.nan, np.float32)
    start = (-room.ctypes.data % 64) // 4 + 1
    room[start : start + values.size] = values.ravel()
    return room[start : start + values.size].reshape(values.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 32), (37, 80), (50, 576), (19, 45)])
def test_embedding_returns_the_table_row(
    native: ModuleType, isa: str, layout: str, rows: int, columns: int
) -> None:
    packed, dense = random_panels(np.random.default_rng(rows), layout, rows, columns)
    for index in {0, rows // 2, rows - 1}:
        out = np.full(columns + 1, 7, np.float32)
        native.embed(isa, packed, LAYOUTS.index(layout), rows, index, out[:columns])
        # One rounding of product and sum may be spared: half a unit of the larger term.
        np.testing.assert_allclose(out[:columns], dense[index], rtol=1e-6, atol=1e-7)
        assert out[columns] == 7


@pytest.mark.parametrize("size", SIZES)
def test_norms_match_the_reference(native: ModuleType, isa: str, size: int) -> None:
    rng = np.random.default_rng(size)
    x = unaligned((rng.normal(3, 5, size) * rng.choice([1, 300], size)).astype(np.float32))
    weight, bias = rng.normal(1, 0.3, (2, size)).astype(np.float32)
    out = np.empty(size, np.float32)
    native.rms_norm(isa, x, weight, 1e-5, out)
    np.testing.assert_allclose(out, reference.rms_norm(x, weight, 1e-5), rtol=4e-7)
    for shift in (bias, None):
        native.layer_norm(isa, x, weight, shift, 1e-5, out)
        want = reference.layer_norm(x, weight, shift, 1e-5)
        np.testing.assert_allclose(out, want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_softcap_matches_the_reference(native: ModuleType, isa: str, size: int) -> None:
    x = unaligned((np.random.default_rng(size).normal(0, 40, size)).astype(np.float32))
    want = reference.softcap(x, 30.0)
    native.softcap(isa, x, 30.0)
    np.testing.assert_allclose(x, want, rtol=0, atol=1e-5)
    assert np.isnan(_capped(native, isa, np.nan)) and _capped(native, isa, np.inf) == 30


def _capped(native: ModuleType, isa: str, value: float) -> np.float32:
    row = np.full(5, value, np.float32)
    native.softcap(isa, row, 30.0)
    return row[4]


def test_norms_work_in_place(native: ModuleType, isa: str) -> None:
    x = np.random.default_rng(0).normal(0, 1, 77).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 77, dtype=np.float32)
    apart = np.empty_like(x)
    native.rms_norm(isa, x, weight, 1e-6, apart)
    native.rms_norm(isa, x, weight, 1e-6, x)
    np.testing.assert_array_equal(x, apart)


def test_rms_norm_neither_overflows_nor_underflows(native: ModuleType, isa: str) -> None:
    weight, out = np.ones(64, np.float32), np.empty(64, np.float32)
    for size in (1e30, 1e-25):
        native.rms_norm(isa, np.full(64, size, np.float32), weight, 0.0, out)
        np.testing.assert_allclose(out, 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("heads", "head_dim", "dim"), [(9, 64, 64), (3, 128, 96), (2, 10, 6), (4, 33, 2)]
)
def test_rope_rotates_pairs_and_leaves_the_remaining_dimensions(
    native: ModuleType, isa: str, heads: int, head_dim: int, dim: int
) -> None:
    rng = np.random.default_rng(dim)
    x = unaligned(rng.normal(0, 1, (heads, head_dim)).astype(np.float32))
    angles = rng.uniform(0, 2 * math.pi, dim // 2)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    want = reference.rope(x[None].copy(), cosines[None], sines[None])[0]
    native.rope(isa, x, cosines, sines)
    np.testing.assert_allclose(x, want, rtol=1e-6, atol=3e-7)
    np.testing.assert_array_equal(x[:, dim:], want[:, dim:])


@pytest.mark.parametrize("size", SIZES)
def test_argmax_and_max_find_the_largest_value_at_every_position(
    native: ModuleType, isa: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    x = unaligned(rng.normal(-50, 10, size).astype(np.float32))
    for place in {0, size // 2, max(size - 2, 0), size - 1}:
        row = unaligned(x)
        row[place] = 100
        assert native.argmax(isa, row) == place
        assert native.max(isa, row) == 100
        row[place:] = 100
        assert native.argmax(isa, row) == place


def test_argmax_of_rows_with_nan_and_infinity(native: ModuleType, isa: str) -> None:
    nan, inf = np.nan, np.inf
    rows = {
        (nan, nan, nan): 0,
        (nan, 1.0, 2.0, nan, 2.0): 2,
        (nan, -inf, -inf): 1,
        (-inf, -inf): 0,
        (0.0, -0.0, inf, inf): 2,
    }
    for row, place in rows.items():
        for repeats in (1, 40):
            x = np.array(row * repeats, np.float32)
            assert native.argmax(isa, x) == place, row
    assert native.max(isa, np.full(50, nan, np.float32)) == -inf


@pytest.mark.parametrize("size", SIZES)
def test_sum_exp_matches_the_reference(native: ModuleType, isa: str, size: int) -> None:
    rng = np.random.default_rng(size)
    x = unaligned(rng.normal(0, 20, size).astype(np.float32))
    if size > 2:
        x[1] = -np.inf
    for scale in (0.3, 1.0, 5.0):
        want = np.exp((x - x.max()).astype(np.float64) * scale).sum()
        got = native.sum_exp(isa, x, float(x.max()), scale)
        # The product with the scale is rounded once: 2^-24 of an exponent of which terms above
        # 1e-7 of the sum have at most 16.
        assert got == pytest.approx(want, rel=2e-6)


def test_sum_exp_is_accurate_over_the_whole_range(native: ModuleType, isa: str) -> None:
    for x in np.linspace(-87, 0, 1000, dtype=np.float32):
        got = native.sum_exp(isa, x[None], 0.0, 1.0)
        assert got == pytest.approx(math.exp(float(x)), rel=3e-7)
    for x in (-88.0, -1000.0, -np.inf):
        assert native.sum_exp(isa, np.array([x], np.float32), 0.0, 1.0) < 1e-38
    assert native.sum_exp(isa, np.full(37, -np.inf, np.float32), 0.0, 1.0) == 0
    assert math.isnan(native.sum_exp(isa, np.array([np.nan], np.float32), 0.0, 1.0))


@pytest.mark.parametrize("size", SIZES)
def test_all_finite_finds_one_nonfinite_value(native: ModuleType, isa: str, size: int) -> None:
    x = unaligned(np.random.default_rng(size).uniform(-3e38, 3e38, size).astype(np.float32))
    assert native.all_finite(isa, x)
    for place in {0, size // 2, size - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            row = unaligned(x)
            row[place] = bad
            assert not native.all_finite(isa, row)
