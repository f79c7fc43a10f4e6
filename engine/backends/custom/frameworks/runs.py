"""Cuts rows into runs of bounded length, as work items for a kernel."""

import numpy as np

from engine.backends.custom.runtime.model_runner import I32


def cut(counts: I32, size: int) -> tuple[I32, I32]:
    """For each run of at most `size` tokens: its row, and its offset within the row."""
    each = -(-counts // size)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), each)
    before = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(each) - each, each)
    return rows, (before * size).astype(np.int32)
