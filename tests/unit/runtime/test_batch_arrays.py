"""The arrays of a step: groups of rows that share leading blocks, against a plain recount."""

import random

import numpy as np

from engine.runtime.batch import _prefix_groups


def recounted(tables, full_blocks):
    """Group by the first block; share as many as all members have in common and have computed."""
    members: dict[int, list[int]] = {}
    for row, full in enumerate(full_blocks):
        if full:
            members.setdefault(tables[row][0], []).append(row)
    shared = {}
    for rows in members.values():
        if len(rows) < 2:
            continue
        limit = min(full_blocks[row] for row in rows)
        common = 0
        while common < limit and len({tables[row][common] for row in rows}) == 1:
            common += 1
        shared[tuple(rows)] = common
    return shared


def test_prefix_groups_of_a_batch_equal_a_recount():
    rng = random.Random(3)
    for _ in range(200):
        num_rows, width = rng.randrange(1, 12), rng.randrange(1, 6)
        tables = [[rng.randrange(1, 4) for _ in range(width)] for _ in range(num_rows)]
        full = [rng.randrange(0, width + 1) for _ in range(num_rows)]
        groups, shared = _prefix_groups(np.array(tables, np.int32), np.array(full, np.int64))
        found = {
            tuple(np.flatnonzero(groups == group).tolist()): int(count)
            for group, count in enumerate(shared)
        }
        assert found == recounted(tables, full)
        assert groups.dtype == shared.dtype == np.int32
