"""Cuts the tokens of each row into runs of limited length, which are the work items of a kernel."""

import numpy as np

from engine.runtime.model_runner import I32


def cut(counts: I32, size: int | I32) -> tuple[I32, I32]:
    """Cuts each row into runs of at most `size` tokens. `counts` has the number of tokens of each
    row. `size` may be an array with a value for each row.

    Returns two arrays with a value for each run. The first has the index of the run's row. The
    second has the index of the run's first token in that row.
    """
    each = -(-counts // size)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), each)
    before = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(each) - each, each)
    sizes = np.repeat(np.broadcast_to(size, counts.shape), each)
    return rows, (before * sizes).astype(np.int32)
