"""Random weights in panel layouts (csrc/base/layout.h), with their dequantized values."""

import numpy as np
from numpy.typing import NDArray

ROWS, GROUP = 16, 32
LAYOUTS = ("Q4", "Q4G16", "Q8", "Q8M", "Q8G16", "F16", "BF16", "F32")
QUANTIZED = LAYOUTS[:5]


def random_panels(
    rng: np.random.Generator, layout: str, rows: int, columns: int, spread: float = 0.05
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The packed bytes (64-byte aligned) and the (rows, columns) floats that they stand for."""
    panels, groups = -(-rows // ROWS), -(-columns // GROUP)
    shape = (panels, groups, ROWS, GROUP)
    if layout in ("F16", "BF16", "F32"):
        dense = rng.normal(0, spread, shape).astype(np.float32)
        _clear_padding(dense, rows, columns)
        dense = _rounded(dense, layout)
        return aligned(_pack_floats(dense, layout)), _matrix(dense, rows, columns)
    top = 16 if layout.startswith("Q4") else 256
    values = rng.integers(0, top, shape)
    halves = 2 if layout.endswith("G16") else 1
    scales = (rng.uniform(0.5, 1.5, (*shape[:3], halves)) * spread * 4 / top).astype(np.float16)
    has_minima = layout in ("Q4", "Q4G16", "Q8M")
    minima = -(scales.astype(np.float32) * rng.uniform(0.3, 0.7, scales.shape) * top)
    minima = minima.astype(np.float16)
    _clear_padding(values, rows, columns, 0 if has_minima else 128)
    past = np.arange(panels * ROWS).reshape(panels, ROWS) >= rows
    scales.swapaxes(1, 2)[past] = 0
    minima.swapaxes(1, 2)[past] = 0
    repeat = GROUP // halves
    wide = np.repeat(scales.astype(np.float32), repeat, axis=-1)
    low = np.repeat(minima.astype(np.float32), repeat, axis=-1)
    dense = wide * values + low if has_minima else wide * (values - 128)
    packed = _pack_quants(values.astype(np.uint8), scales, minima, layout)
    return aligned(packed), _matrix(dense.astype(np.float32), rows, columns)


def aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy that begins on a 64-byte boundary."""
    room = np.empty(data.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + data.size] = data
    return room[start : start + data.size]


def _matrix(dense: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    panels, groups = dense.shape[:2]
    whole = dense.swapaxes(1, 2).reshape(panels * ROWS, groups * GROUP)
    return np.ascontiguousarray(whole[:rows, :columns])


def _clear_padding(values: NDArray, rows: int, columns: int, zero: int = 0) -> None:
    panels, groups = values.shape[:2]
    past_rows = np.arange(panels * ROWS).reshape(panels, ROWS) >= rows
    values.swapaxes(1, 2)[past_rows] = zero
    values[:, -1, :, columns - (groups - 1) * GROUP :] = zero


def _rounded(dense: NDArray[np.float32], layout: str) -> NDArray[np.float32]:
    if layout == "F16":
        return dense.astype(np.float16).astype(np.float32)
    if layout == "BF16":
        return (dense.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return dense


def _pack_floats(dense: NDArray[np.float32], layout: str) -> NDArray[np.uint8]:
    if layout == "F32":
        return _bytes(dense.swapaxes(2, 3))
    short = dense.astype(np.float16) if layout == "F16" else (dense.view(np.uint32) >> 16)
    pairs = short.astype(np.float16 if layout == "F16" else np.uint16)
    pairs = pairs.reshape(*dense.shape[:3], GROUP // 2, 2)
    return _bytes(pairs.swapaxes(2, 3))


def _pack_quants(
    values: NDArray[np.uint8],
    scales: NDArray[np.float16],
    minima: NDArray[np.float16],
    layout: str,
) -> NDArray[np.uint8]:
    panels, groups = values.shape[:2]
    if layout.startswith("Q4"):
        values = values[..., :16] | values[..., 16:] << 4
    quads = values.reshape(*values.shape[:3], -1, 4).swapaxes(2, 3)  # (P, G, quads, rows, 4)
    body = quads.reshape(panels, groups, -1)
    halves = _bytes(scales.swapaxes(2, 3)).reshape(panels, groups, -1)
    if layout == "Q8":
        room = np.zeros((panels, -(-groups * 32 // 64) * 64), np.uint8)
        room[:, : groups * 32] = halves.reshape(panels, -1)
        return np.concatenate((body.reshape(panels, -1), room), axis=1).ravel()
    parts = [body, halves]
    if layout != "Q8G16":
        parts.append(_bytes(minima.swapaxes(2, 3)).reshape(panels, groups, -1))
    return np.concatenate(parts, axis=2).ravel()


def _bytes(values: NDArray) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).ravel()
