"""The buffers of CUDA steps: device tensors and graphs for each size of a step, and pinned host
buffers. One pinned buffer holds all input arrays of a step, so one copy takes them to the
device. Another buffer receives all results of the step in one copy.

The host never waits for a copy to the device. It writes only to a buffer that no running copy
reads. Buffers are reused. If all buffers are in use, a new one is allocated.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runners.layout import Layout
from engine.runtime.model_runner import I32, BatchInputs, RunnerConfig, StepOutput
from engine.torch.execution.adapter_stacks import step_tiles
from engine.torch.execution.cache import slots_by_cache
from engine.torch.execution.device_sampler import Kind
from engine.torch.execution.step_sizes import Size, StepSizes
from engine.torch.kernels import lora
from engine.torch.kernels.attention_triton import (
    NUM_COUNTS,
    SHARED_FIELDS,
    SPAN_FIELDS,
    TILE_FIELDS,
    ListLengths,
    TritonAttention,
    all_tables,
)
from engine.torch.layers.scans import Rows

if TYPE_CHECKING:
    from engine.torch.execution.taps import Captured, StepTaps

TILES_OF_ADAPTERS = ("token_adapters", "logit_adapters")
FIELDS = {
    **{"spans": SPAN_FIELDS, "partials": 2, "tiles": TILE_FIELDS, "shared": SHARED_FIELDS},
    **dict.fromkeys(TILES_OF_ADAPTERS, lora.TILE_FIELDS),
}
Arrays = dict[str, NDArray[np.generic]]


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


class StepBuffers:
    """Takes the arrays of steps to the device. The arrays of all steps that have graphs are in one
    device buffer, because captured graphs contain its address. A step without a graph has a buffer
    of its own.
    """

    def __init__(
        self,
        config: RunnerConfig,
        attention: TritonAttention,
        sizes: StepSizes,
        num_caches: int,
        device: torch.device,
    ) -> None:
        self._lists, self._device = attention, device
        self._spare_slot = config.max_slots
        # The arrays that each cache has for itself, by name.
        self.slots_names = ("write_slots", "window_slots")[:num_caches]
        self._counts_names = ("counts", "window_counts")[:num_caches]
        self._buffer = torch.zeros(
            self._max_length(config, sizes), dtype=torch.int32, device=device
        )
        self._each = torch.arange(
            max((config.max_slots, *sizes.tokens)) + 1, dtype=torch.int32, device=device
        )
        self._inbound = PinnedRing()

    def step(self, size: Size, room: ListLengths | None = None) -> BufferedStep:
        """New data for steps of this size. `room` is given for a step without a graph."""
        room = room or self._room_for(size)
        return BufferedStep(size, room, self._layout(size, room))

    def send(
        self, step: BufferedStep, inputs: BatchInputs, lists: dict[str, I32], *, static: bool
    ) -> None:
        """Queues the copy of a step's arrays to the device, where `step.views` has them. `static`:
        into the buffer that graphs read.
        """
        arrays = self._arrays(inputs, lists, step.size)
        length = step.layout.length(arrays)
        pinned = self._inbound.take(length)
        step.layout.write(pinned.array, arrays)
        target = self._buffer
        if not static:
            target = torch.empty(length, dtype=torch.int32, device=self._device)
        if not step.views:
            self._lay_out(step, target)
        target[:length].copy_(pinned.tensor[:length], non_blocking=True)
        pinned.copied.record()
        self._inbound.give_back(pinned)

    def _max_length(self, config: RunnerConfig, sizes: StepSizes) -> int:
        """The max number of values in the arrays of a step with a graph."""
        table = -(-config.max_seq_len // config.block_size)
        tables = np.empty(len(self.slots_names) * config.max_slots * table, np.bool_)
        return max(
            self._layout(size, self._room_for(size)).length({"tables": tables})
            for size in sizes.largest()
        )

    def _room_for(self, size: Size) -> ListLengths:
        return self._lists.room_for(
            size.tokens, size.rows, only_decodes=size.only_decodes, shares=size.shares
        )

    def _layout(self, size: Size, room: ListLengths) -> Layout:
        rows, spare_slot = size.rows, self._spare_slot
        sizes = {
            "token_ids": size.tokens,
            "positions": size.tokens,
            **dict.fromkeys(self._counts_names, NUM_COUNTS),
            **dict.fromkeys(self.slots_names, size.tokens),
            "seq_lens": rows,
            "slots": rows,
            "spans": SPAN_FIELDS * room.spans,
            "partials": 2 * rows,
        }
        if size.num_adapters:
            for name, count in zip(TILES_OF_ADAPTERS, (size.tokens, size.samples), strict=True):
                tiles = max(1, lora.most_tiles(count, size.num_adapters))
                sizes[name] = lora.TILE_FIELDS * tiles
        if size.shares:
            sizes |= {"shared": SHARED_FIELDS * room.shared, "members": rows}
        if not size.only_decodes:
            sizes |= {
                "token_rows": size.tokens,
                "query_start": rows + 1,
                "tiles": TILE_FIELDS * room.tiles,
                "logit_rows": size.samples,
                "sample_slots": size.samples,
            }
        padded = ("token_ids", "positions", "partials", "logit_rows", *self.slots_names)
        pads = dict.fromkeys(padded, 0)
        pads |= {"slots": spare_slot, "sample_slots": spare_slot, "token_rows": rows}
        return Layout(sizes, pads, last="tables")

    def _arrays(self, inputs: BatchInputs, lists: dict[str, I32], size: Size) -> Arrays:
        arrays: Arrays = {
            "token_ids": inputs.token_ids,
            "positions": inputs.positions,
            **dict(zip(self.slots_names, slots_by_cache(inputs), strict=True)),
            "seq_lens": inputs.seq_lens,
            "slots": inputs.slots,
            "tables": all_tables(inputs),
            **lists,
        }
        if size.num_adapters:
            tiles = step_tiles(inputs, size.tokens, size.samples, size.num_adapters)
            arrays |= zip(TILES_OF_ADAPTERS, tiles, strict=True)
        if size.only_decodes:
            return arrays
        token_rows = np.repeat(np.arange(len(inputs.slots)), np.diff(inputs.query_start))
        arrays["token_rows"] = token_rows
        arrays["query_start"] = inputs.query_start
        arrays["logit_rows"] = inputs.logit_rows
        arrays["sample_slots"] = inputs.slots[token_rows[inputs.logit_rows]]
        return arrays

    def _lay_out(self, step: BufferedStep, buffer: Tensor) -> None:
        size = step.size
        fields = {name: width for name, width in FIELDS.items() if name in step.layout}
        views = step.layout.views(buffer, fields)
        if size.only_decodes:
            views["token_rows"] = self._each[: size.rows]
            views["query_start"] = self._each[: size.rows + 1]
            views["sample_slots"] = views["slots"]
        step.views = views
        step.results = torch.empty(
            size.samples + size.rows + 1, dtype=torch.int32, device=self._device
        )
