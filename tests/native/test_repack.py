"""Packing of stored tensors into panels: each type against its dequantizer, parts stacked."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.weights.quants import TRAITS, dequantize, kernel_type
from tests.native import panels

# Where blocks keep their float16 factors; every other byte may be anything.
FACTORS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q4_G16": (0, 2, 4, 6),
    "Q8_G16": (0, 2),
}
FLOATS = ("F32", "F16", "BF16")
# Types whose scales are products, rounded to a half; all others keep their values exactly.
ROUNDED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
HALF_ERROR = 2.0**-11


def stored_bytes(rng: np.random.Generator, dtype: str, rows: int, columns: int) -> NDArray:
    """A tensor of that type with random content."""
    traits = TRAITS[dtype]
    if dtype in FLOATS:
        values = rng.normal(0, 1, (rows, columns)).astype(np.float32)
        if dtype == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).ravel()
        return values.astype(np.float16 if dtype == "F16" else np.float32).view(np.uint8).ravel()
    blocks = rows * columns // traits.block_elems
    raw = rng.integers(0, 256, (blocks, traits.block_bytes), np.uint8)
    for offset in FACTORS[dtype]:
        factors = rng.normal(0, 0.02, (blocks, 1)).astype(np.float16)
        raw[:, offset : offset + 2] = factors.view(np.uint8)
    return raw.ravel()


def part(dtype: str, raw: NDArray, rows: int, order: Any = None, transposed: bool = False) -> tuple:
    return (dtype, raw, rows, order, transposed)


def repack(
    native: ModuleType,
    parts: list[tuple],
    columns: int,
    interleaved: bool = False,
    threads: int = 1,
) -> NDArray[np.uint8]:
    """The panels, in memory that held something else before."""
    layout = native.layout_of(parts[0][0])
    counts = [-(-rows // 16) if interleaved else rows / 16 for _, _, rows, _, _ in parts]
    room = int(np.ceil(sum(counts))) * native.panel_bytes(layout, columns)
    out = np.full(room, 0xA5, np.uint8)
    assert native.repack([(layout, columns, interleaved, parts, out)], threads) is None
    return out


def decode(packed: NDArray[np.uint8], layout: str, columns: int) -> tuple[NDArray, NDArray]:
    """All rows of all panels as floats, and how large the terms were that they are sums of."""
    groups = -(-columns // 32)
    if layout in FLOATS:
        return _decode_floats(packed, layout, groups)
    quads = 4 if layout.startswith("Q4") else 8
    halves = 2 if layout.endswith("G16") else 1
    shape = (-1, groups, quads, 16, 4)
    if layout == "Q8":
        panel = packed.reshape(-1, groups * 512 + -(-groups * 32 // 64) * 64)
        body = panel[:, : groups * 512].reshape(shape)
        scales = np.ascontiguousarray(panel[:, groups * 512 :]).view(np.float16)
        assert not scales[:, groups * 16 :].any(), "padding after the scales"
        factors = scales[:, : groups * 16].reshape(-1, groups, 1, 16)
    else:
        size = {"Q4": 320, "Q4G16": 384, "Q8M": 576, "Q8G16": 576}[layout]
        group = packed.reshape(-1, groups, size)
        body = group[..., : quads * 64].reshape(shape)
        factors = np.ascontiguousarray(group[..., quads * 64 :]).view(np.float16)
        factors = factors.reshape(len(group), groups, -1, 16)
    values = body.swapaxes(2, 3).reshape(-1, groups, 16, quads * 4)
    if quads == 4:
        values = np.concatenate((values & 15, values >> 4), axis=-1)
    wide = np.repeat(factors.astype(np.float32), 32 // halves, axis=2).swapaxes(2, 3)
    has_minima = layout in ("Q4", "Q4G16", "Q8M")
    products = (values.astype(np.float32) - (0 if has_minima else 128)) * wide[..., :32]
    minima = wide[..., 32:] if has_minima else np.zeros_like(products)
    return _rows(products + minima), _rows(np.abs(products) + np.abs(minima))


def _decode_floats(packed: NDArray[np.uint8], layout: str, groups: int) -> tuple[NDArray, NDArray]:
    if layout == "F32":
        dense = packed.view(np.float32).reshape(-1, groups, 32, 16).swapaxes(2, 3)
    else:
        pairs = packed.view(np.uint16).reshape(-1, groups, 16, 16, 2).swapaxes(2, 3)
        short = np.ascontiguousarray(pairs).reshape(-1, groups, 16, 32)
        dense = short.view(np.float16) if layout == "F16" else (short.astype(np.uint32) << 16)
        dense = dense.astype(np.float32) if layout == "F16" else dense.view(np.float32)
    return _rows(dense), _rows(np.abs(dense))


def _rows(dense: NDArray) -> NDArray:
    return dense.swapaxes(1, 2).reshape(-1, dense.shape[1] * 32).astype(np.float32)


def name_of(native: ModuleType, dtype: str) -> str:
    return panels.LAYOUTS[native.layout_of(dtype)]


def check(
    native: ModuleType, packed: NDArray[np.uint8], dtype: str, expected: NDArray[np.float32]
) -> None:
    """Every row decodes to `expected`; all that lies beside it decodes to zero."""
    rows, columns = expected.shape
    found, terms = decode(packed, name_of(native, dtype), columns)
    np.testing.assert_array_equal(found[rows:], 0)
    np.testing.assert_array_equal(found[:, columns:], 0)
    allowed = terms[:rows, :columns] * (1.01 * HALF_ERROR if dtype in ROUNDED else 0)
    assert (np.abs(found[:rows, :columns] - expected) <= allowed).all()


@pytest.mark.parametrize("dtype", [*FACTORS, *FLOATS])
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("blocks", [1, 11])
def test_packed_panels_dequantize_to_the_stored_values(
    native: ModuleType, dtype: str, rows: int, blocks: int
) -> None:
    rng = np.random.default_rng(rows * 10 + blocks)
    columns = blocks * TRAITS[dtype].block_elems * (1 if dtype in FACTORS else 33)
    raw = stored_bytes(rng, dtype, rows, columns)
    packed = repack(native, [part(dtype, raw, rows)], columns)
    check(native, packed, dtype, dequantize(dtype, raw, (rows, columns)))


def test_every_type_that_loads_has_a_layout(native: ModuleType) -> None:
    names = {dtype: name_of(native, kernel_type(dtype)) for dtype in TRAITS}
    assert names == {
        "F32": "F32",
        "F16": "F16",
        "BF16": "BF16",
        **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "Q4"),
        **dict.fromkeys(("TQ1_0", "TQ2_0", "Q1_0", "IQ1_S", "IQ3_S"), "Q4"),
        "INT4": "Q4",
        **dict.fromkeys(("INT8", "INT4_ORDERED", "FP8_E4M3", "FP8_E5M2", "NF4", "BNB_FP4"), "Q8"),
        "FP4_G16": "Q8G16",
        **dict.fromkeys(("Q2_K", "Q3_K", "Q4_G16", "IQ1_M"), "Q4G16"),
        **dict.fromkeys(("Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"), "Q8"),
        **dict.fromkeys(("IQ2_XXS", "IQ3_XXS"), "Q8"),
        **dict.fromkeys(("Q5_1", "Q5_K"), "Q8M"),
        **dict.fromkeys(("Q6_K", "Q8_G16", "IQ2_XS", "IQ2_S", "NVFP4"), "Q8G16"),
    }
    with pytest.raises(ValueError, match="IQ2_S"):
        native.layout_of("IQ2_S")  # kernels read it as Q8_G16


def test_fp4_scales_are_powers_of_two(native: ModuleType) -> None:
    """All exponents that a half can have, and smaller ones, which become zero."""
    raw = np.random.default_rng(12).integers(0, 256, (16, 8, 17), np.uint8)
    raw[..., 0] = np.arange(128).reshape(16, 8) + 16
    packed = repack(native, [part("MXFP4", raw.ravel(), 16)], 256)
    found, _ = decode(packed, "Q8", 256)
    expected = dequantize("MXFP4", raw.ravel(), (16, 256))
    expected[np.abs(expected) < 2.0**-24] = 0
    tiny = np.abs(expected) <= 12 * 2.0**-25
    np.testing.assert_array_equal(np.where(tiny, 0, found), np.where(tiny, 0, expected))


@pytest.mark.parametrize(("dtype", "layout"), [("Q4_1", "Q4"), ("Q8_0", "Q8"), ("Q5_1", "Q8M")])
def test_packed_bytes_of_quantized_layouts_are_exact(
    native: ModuleType, dtype: str, layout: str
) -> None:
    """To the byte, padding included, what the kernels' tests take the layout to be."""
    rng = np.random.default_rng(5)
    rows, groups = 21, 3
    top = {"Q4": 16, "Q8": 256, "Q8M": 32}[layout]
    values = rng.integers(0, top, (2, groups, 16, 32)).astype(np.uint8)
    scales = rng.normal(0, 0.1, (2, groups, 16, 1)).astype(np.float16)
    minima = rng.normal(0, 0.1, (2, groups, 16, 1)).astype(np.float16)
    panels._clear_padding(values, rows, groups * 32, 128 if layout == "Q8" else 0)
    for factors in (scales, minima):
        factors.swapaxes(1, 2)[np.arange(32).reshape(2, 16) >= rows] = 0
    lines = [
        block.swapaxes(1, 2).reshape(32, groups, -1)[:rows] for block in (values, scales, minima)
    ]
    fields = [lines[1].view(np.uint8), lines[2].view(np.uint8)]
    if layout == "Q4":
        fields.append(lines[0][..., :16] | lines[0][..., 16:] << 4)
    elif layout == "Q8":
        fields[1:] = [lines[0] ^ 128]
    else:
        bits = np.packbits(lines[0] >> 4, axis=-1, bitorder="little")
        low = lines[0] & 15
        fields += [bits, low[..., :16] | low[..., 16:] << 4]
    raw = np.concatenate(fields, axis=-1).ravel()
    packed = repack(native, [part(dtype, raw, rows)], groups * 32)
    np.testing.assert_array_equal(packed, panels._pack_quants(values, scales, minima, layout))


@pytest.mark.parametrize("layout", FLOATS)
def test_packed_bytes_of_float_layouts_are_exact(native: ModuleType, layout: str) -> None:
    packed, dense = panels.random_panels(np.random.default_rng(1), layout, 21, 45)
    if layout == "F16":
        raw = dense.astype(np.float16).view(np.uint8)
    else:
        raw = dense.view(np.uint8).reshape(-1, 4)[:, 2 if layout == "BF16" else 0 :]
    raw = np.ascontiguousarray(raw).ravel()
    np.testing.assert_array_equal(repack(native, [part(layout, raw, 21)], 45), packed)


@pytest.mark.parametrize("dtype", ["Q4_1", "Q6_K", "BF16", "F32"])
def test_several_tensors_are_stacked_into_one_packed_matrix(native: ModuleType, dtype: str) -> None:
    """Parts end in the middle of panels; the second one's rows are stored in another order."""
    rng = np.random.default_rng(2)
    columns, sizes = 256, (24, 40, 7)
    raws = [stored_bytes(rng, dtype, rows, columns) for rows in sizes]
    order = rng.permutation(40)
    orders = (None, order, None)
    parts = [part(dtype, *each) for each in zip(raws, sizes, orders, strict=True)]
    dense = [dequantize(dtype, raw, (rows, columns)) for raw, rows in zip(raws, sizes, strict=True)]
    dense[1] = dense[1][order]
    check(native, repack(native, parts, columns), dtype, np.concatenate(dense))


def test_types_of_one_layout_can_be_stacked(native: ModuleType) -> None:
    rng = np.random.default_rng(3)
    first, second = stored_bytes(rng, "Q8_0", 10, 64), stored_bytes(rng, "Q5_0", 10, 64)
    packed = repack(native, [part("Q8_0", first, 10), part("Q5_0", second, 10)], 64)
    dense = [dequantize("Q8_0", first, (10, 64)), dequantize("Q5_0", second, (10, 64))]
    check(native, packed, "Q8_0", np.concatenate(dense))


@pytest.mark.parametrize("rows", [16, 40])
@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "Q2_K", "F16"])
def test_panels_of_gate_and_up_alternate(native: ModuleType, dtype: str, rows: int) -> None:
    rng = np.random.default_rng(4)
    raws = [stored_bytes(rng, dtype, rows, 256) for _ in range(2)]
    packed = repack(native, [part(dtype, raw, rows) for raw in raws], 256, interleaved=True)
    pairs = packed.reshape(-(-rows // 16), 2, -1)
    for side, raw in enumerate(raws):
        dense = dequantize(dtype, raw, (rows, 256))
        check(native, np.ascontiguousarray(pairs[:, side]).ravel(), dtype, dense)


@pytest.mark.parametrize("dtype", FLOATS)
def test_transposed_float_tensors_are_packed_in_row_order(native: ModuleType, dtype: str) -> None:
    rng = np.random.default_rng(6)
    rows, columns = 21, 45
    raw = stored_bytes(rng, dtype, columns, rows)
    packed = repack(native, [part(dtype, raw, rows, None, True)], columns)
    check(native, packed, dtype, dequantize(dtype, raw, (columns, rows)).T)


def test_threads_do_not_change_a_byte(native: ModuleType) -> None:
    rng = np.random.default_rng(7)
    raw = stored_bytes(rng, "Q5_K", 700, 512)
    alone, shared = (repack(native, [part("Q5_K", raw, 700)], 512, threads=n) for n in (1, 5))
    np.testing.assert_array_equal(alone, shared)


def test_subnormal_scales_stay_exact_when_packed(native: ModuleType) -> None:
    """A whole multiple of a subnormal half is a half again: nothing underflows."""
    raw = stored_bytes(np.random.default_rng(8), "Q4_K", 16, 256).reshape(16, 144)
    raw[:, :4] = np.array([3, 1], np.uint16).view(np.uint8)
    packed = repack(native, [part("Q4_K", raw.ravel(), 16)], 256)
    found, _ = decode(packed, "Q4", 256)
    np.testing.assert_array_equal(found, dequantize("Q4_K", raw.ravel(), (16, 256)))


@pytest.mark.parametrize("factor", [60000.0, np.inf, np.nan])
@pytest.mark.parametrize("dtype", FACTORS)
def test_scales_that_overflow_float16_are_refused(
    native: ModuleType, dtype: str, factor: float
) -> None:
    """Above the largest half, infinite or not a number: the matrix is named, not rounded."""
    rng = np.random.default_rng(9)
    good = stored_bytes(rng, dtype, 20, 256)
    raw = stored_bytes(rng, dtype, 20, 256).reshape(-1, TRAITS[dtype].block_bytes)
    offset = FACTORS[dtype][-1]
    raw[-1, offset : offset + 2] = np.array([factor], np.float16).view(np.uint8)
    layout = native.layout_of(dtype)
    size = 2 * native.panel_bytes(layout, 256)
    jobs = [
        (layout, 256, False, [part(dtype, data, 20)], np.empty(size, np.uint8))
        for data in (good, raw.ravel(), good)
    ]
    kept = ("Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_G16", "Q8_G16")
    stored_as_it_is = dtype in kept and factor == 60000.0
    assert native.repack(jobs, 2) == (None if stored_as_it_is else 1)


def test_invalid_repack_arguments_are_refused(native: ModuleType) -> None:
    rng = np.random.default_rng(10)
    raw = stored_bytes(rng, "Q4_1", 16, 64)
    out = np.empty(native.panel_bytes(0, 64), np.uint8)

    def attempt(
        *parts: tuple, layout: int = 0, columns: int = 64, interleaved: bool = False
    ) -> None:
        native.repack([(layout, columns, interleaved, list(parts), out)], 1)

    good = part("Q4_1", raw, 16)
    attempt(good)
    for reason, arguments, options in (
        ("do not match", [part("Q4_1", raw[:-1], 16)], {}),
        ("do not match", [part("Q4_1", raw, 17)], {}),
        ("another layout", [part("Q8_0", raw, 16)], {}),
        ("whole blocks", [good], {"columns": 65}),
        ("rows", [part("Q4_1", raw, -1)], {}),
        ("columns and parts", [], {}),
        ("columns and parts", [good], {"columns": 0}),
        ("another size", [good, good], {}),
        ("two parts", [good], {"interleaved": True}),
        ("no such layout", [good], {"layout": 8}),
        ("no panels", [part("Q9", raw, 16)], {}),
        ("as many rows", [part("Q4_1", raw, 16, np.arange(15))], {}),
        ("not there", [part("Q4_1", raw, 16, np.arange(1, 17))], {}),
        ("transposed", [part("Q4_1", raw, 16, None, True)], {}),
    ):
        with pytest.raises(ValueError, match=reason):
            attempt(*arguments, **options)
