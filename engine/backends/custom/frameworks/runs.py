"""Cuts the tokens of each sequence into runs of limited length, as work items for a kernel."""

import numpy as np

from engine.backends.custom.runtime.model_runner import I32


def cut(counts: I32, size: int) -> tuple[I32, I32]:
    """Cuts each row into runs of at most `size` tokens; `counts` are the rows' token counts.

    Returns two arrays with a value per run: its row, and the index of its first token in the row.
    """
    each = -(-counts // size)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), each)
    before = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(each) - each, each)
    return rows, (before * size).astype(np.int32)
