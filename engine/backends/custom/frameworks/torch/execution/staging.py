"""The buffers of CUDA steps: device tensors and graphs for each size of a step, and pinned host
buffers. One pinned buffer holds all input arrays of a step, so one copy takes them to the
device. Another buffer receives all results of the step in one copy.

The host never waits for a copy to the device. It writes only to a buffer that no running copy
reads. Buffers are reused. If all buffers are in use, a new one is allocated.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.custom.frameworks.layout import Layout
from engine.backends.custom.frameworks.torch.execution.device_sampler import Kind
from engine.backends.custom.frameworks.torch.kernels.attention_triton import ListLengths
from engine.backends.custom.frameworks.torch.layers.scans import Rows
from engine.backends.custom.runtime.model_runner import I32, StepOutput

if TYPE_CHECKING:
    from engine.backends.custom.frameworks.torch.execution.taps import Captured, Shapes, StepTaps


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
    captured: "Captured | None" = None  # what the taps of the step captured

    def wait(self) -> StepOutput:
        self.pinned.copied.synchronize()
        array, start = self.pinned.array, self.finite_at
        output = StepOutput(
            tokens=array[: self.num_samples].copy(),
            finite=array[start : start + self.num_rows] != 0,
            captured=None if self.captured is None else self.captured.rows(),
        )
        self.ring.give_back(self.pinned)
        return output


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a step, with padding. Each size has its own buffers and CUDA graphs."""

    tokens: int
    rows: int
    samples: int
    only_decodes: bool
    shares: bool
    taps: "Shapes" = ()  # a step with taps has a graph of its own
    num_adapters: int = 0  # the most LoRA adapters that rows may have; 0: the step has no tiles


class BufferedStep:
    """The data that all steps of one size share: views of the device buffer, output tensors, and
    the captured CUDA graphs.
    """

    def __init__(self, size: Size, room: ListLengths, layout: Layout) -> None:
        self.size, self.room, self.layout = size, room, layout
        self.num_uses = 0
        self.views: dict[str, Tensor] = {}
        self.results = torch.empty(0)  # (samples + rows + 1,) int32: tokens, then finite flags
        self.logits: Tensor | None = None  # (samples, V)
        self.stream: Tensor | None = None  # (samples, D) residual stream before the final norm
        self.rows: Rows | None = None  # only if layers keep states
        self.taps: StepTaps | None = None
        self.forward: torch.cuda.CUDAGraph | None = None
        self.sample_graphs: dict[Kind, torch.cuda.CUDAGraph] = {}

    @property
    def tokens(self) -> Tensor:
        return self.results[: self.size.samples]

    @property
    def sample_slots(self) -> Tensor:
        return self.views["sample_slots"]


@dataclass(frozen=True, slots=True)
class CudaHandle:
    step: BufferedStep
    num_rows: int
    num_samples: int
    captured: "Captured | None" = None
