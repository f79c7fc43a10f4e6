"""Pinned host buffers. One buffer holds all input arrays of a step, so one copy takes them to the
device. Another buffer receives all results of the step in one copy.

The host never waits for a copy to the device. It writes only to a buffer that no running copy
reads. Buffers are reused. If all buffers are in use, a new one is allocated.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.custom.runtime.model_runner import I32, StepOutput


@dataclass(slots=True)
class Pinned:
    """A page-locked host buffer, as a tensor and as an array of the same memory. The event `copied`
    occurs when the buffer's last copy is done.
    """

    tensor: Tensor
    array: I32 = field(init=False)
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def __post_init__(self) -> None:
        self.array = self.tensor.numpy()


class PinnedRing:
    """A pool of reusable pinned buffers. A buffer that was taken is not in the pool until it is
    given back.
    """

    def __init__(self) -> None:
        self._free: list[Pinned] = []

    def take(self, size: int) -> Pinned:
        """Takes a buffer of at least `size` values that no running copy reads."""
        for index, pinned in enumerate(self._free):
            if len(pinned.array) >= size and pinned.copied.query():
                return self._free.pop(index)
        rounded = 1 << max(size - 1, 1023).bit_length()
        return Pinned(_page_locked(rounded))

    def give_back(self, pinned: Pinned) -> None:
        self._free.append(pinned)


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=True)


@dataclass(frozen=True, slots=True)
class CudaPendingTokens:
    """The sampled tokens of a step, which may still be on their way to the host. The step has no
    logprobs and no hidden states.
    """

    pinned: Pinned
    ring: PinnedRing
    num_samples: int
    finite_at: int
    num_rows: int

    def wait(self) -> StepOutput:
        self.pinned.copied.synchronize()
        array, start = self.pinned.array, self.finite_at
        output = StepOutput(
            tokens=array[: self.num_samples].copy(),
            finite=array[start : start + self.num_rows] != 0,
        )
        self.ring.give_back(self.pinned)
        return output
