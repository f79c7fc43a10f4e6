"""The keys of random draws: functions of (seed, choice, position) and of the token id alone.

Every framework turns the same words into the same noise, with 32-bit integer arithmetic that wraps
around. No generator state exists, so neighbours cannot disturb a row.
"""

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.runtime.seam import I32, I64


def token_words(vocab_size: int) -> I32:
    """One well-mixed word per token id; constant for a model."""
    return _mix64(np.arange(vocab_size, dtype=np.uint64)).astype(np.uint32).view(np.int32)


def row_keys(seed: I64, choice: I32, position: I32) -> I32:
    """(R, 2) words per row. The second is odd, so that multiplying by it loses nothing."""
    key = _mix64(seed.astype(np.uint64))
    key = _mix64(key ^ choice.astype(np.uint64))
    key = _mix64(key ^ (position.astype(np.uint64) << np.uint64(32)))
    words = np.stack(((key >> np.uint64(32)), key | np.uint64(1)), axis=1)
    return words.astype(np.uint32).view(np.int32)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words whose every output bit depends on every input bit."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))
