"""Rows of the host tier that a GPU reads by itself."""

import gc

import numpy as np

from engine.torch.execution import blocks


def test_a_pinned_row_is_reused_when_unreferenced(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "SLAB_BYTES", 64)
    new_row = blocks.PinnedRows(pins=False)
    rows = [new_row(16) for _ in range(4)]
    for number, row in enumerate(rows):
        row[:] = number
    lent = rows[1]
    addresses = {row.ctypes.data for row in rows}
    del rows, row
    gc.collect()
    again = [new_row(16) for _ in range(3)]
    assert {each.ctypes.data for each in again} == addresses - {lent.ctypes.data}
    assert np.all(lent == 1), "whoever still reads a row keeps it"
    assert new_row(16).ctypes.data not in addresses, "a second slab"
