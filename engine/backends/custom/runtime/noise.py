"""The keys of random draws: functions of (seed, choice, position) and of the token id alone.

Every framework turns the same words into the same noise, with 32-bit integer arithmetic that wraps
around. No generator state exists, so neighbours cannot disturb a row.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.runtime.seam import I32, I64

MIX_1, MIX_2 = 0x7FEB352D, -0x7B935975  # int32 multipliers that spread a bit over the word
MASK_31 = 0x7FFFFFFF


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


def gumbel(np_like: Any, keys: Any, words: Any) -> Any:
    """Standard Gumbel noise (R, V) from row keys (R, 2) and token words (V,), by numpy or by a
    library whose functions have its names.
    """
    bits = (words ^ keys[:, :1]) * keys[:, 1:]  # int32, wrapping around
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * MIX_1
    bits = ((bits ^ ((bits >> 16) & 0xFFFF)) * MIX_2) & MASK_31
    # Uniform in (0, 1), finest near 0: there lie the exponentials that win.
    uniform = np_like.clip(bits.astype(np.float32), 0.5, 2.0**31 - 128) * 2.0**-31
    return -np_like.log(-np_like.log1p(-uniform))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words whose every output bit depends on every input bit."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))
