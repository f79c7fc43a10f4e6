"""The taps of a step on the device, for runners with and without CUDA graphs."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.architectures.sites import Site
from engine.runtime.interp.groups import GroupShape, TapGroup, grouped
from engine.runtime.interp.taps import CAPTURE, EXTRA_COLUMNS, TapInputs
from engine.runtime.model_runner import F32
from engine.torch.models.tapped import TensorGroup, TensorTaps
from engine.torch.transfer import to_device, to_host

Shapes = tuple[GroupShape, ...]


class Captured:
    """What the taps of a step captured, on its way to the host."""

    def __init__(self, taps: TapInputs, groups: Sequence[TapGroup], step: "StepTaps") -> None:
        self._taps, self._groups = taps, groups
        # The copy to the host is queued before the next step, which captures to the same tensors.
        self._values = [to_host(each) if each.is_cuda else each.clone() for each in step.captured()]

    def rows(self) -> F32:
        """The rows that the step's taps asked for. Valid when the step has finished."""
        if self._taps.num_captured == 1 and self._values[0].shape[1] == self._taps.width:
            return self._values[0].numpy()[:1]  # as in most steps of a stream
        out = np.zeros((self._taps.num_captured, self._taps.width), np.float32)
        owners = (group for group in self._groups if group.shape.kind == CAPTURE)
        for group, values in zip(owners, self._values, strict=True):
            out[group.rows, : values.shape[1]] = values.numpy()[: len(group.rows)]
        return out


class StepTapping:
    """The taps of one step, in groups."""

    def __init__(self, taps: TapInputs) -> None:
        self._taps, self._groups = taps, grouped(taps)
        self.shapes: Shapes = tuple(group.shape for group in self._groups)

    def put(
        self, known: "StepTaps | None", sites: tuple[Site, ...], device: torch.device
    ) -> "StepTaps":
        """Copies the taps to the device, to the tensors of an earlier step if there was one."""
        if known is None:
            return StepTaps(self._groups, sites, device)
        known.write(self._groups)
        return known

    def captured(self, step: "StepTaps | None") -> Captured:
        assert step is not None
        return Captured(self._taps, self._groups, step)


class StepTaps:
    """The taps of all steps that have groups of the same shapes. `write` sets those of a step."""

    def __init__(
        self, groups: Sequence[TapGroup], sites: tuple[Site, ...], device: torch.device
    ) -> None:
        self._made = [_on_device(group, sites, device) for group in groups]
        self._written = groups  # what the tensors have
        self.taps = TensorTaps(self._made, sites)

    def write(self, groups: Sequence[TapGroup]) -> None:
        """Copies what differs from the last step. While a stream decodes, that is nothing."""
        if groups is self._written:
            return
        for made, group, last in zip(self._made, groups, self._written, strict=True):
            width = made.vectors.shape[1] - EXTRA_COLUMNS
            if not np.array_equal(group.tokens, last.tokens):
                _copy(made.tokens, group.tokens.astype(np.int64))
            if not np.array_equal(group.scales, last.scales):
                _copy(made.scales, group.scales[:, None])
            if not np.array_equal(group.vectors, last.vectors):
                _copy(made.vectors, _cut(group.vectors, width))
            if not np.array_equal(group.decoders, last.decoders):
                _copy(made.decoders, _cut(group.decoders, width))
        self._written = groups

    def captured(self) -> list[Tensor]:
        """The captured values of each group that captures. The next step overwrites them."""
        return [each.captured for each in self._made if each.shape.kind == CAPTURE]


def _on_device(group: TapGroup, sites: tuple[Site, ...], device: torch.device) -> TensorGroup:
    shape = group.shape
    width = sites[shape.site].width
    size = shape.size if shape.kind == CAPTURE else 0
    return TensorGroup(
        shape,
        to_device(group.tokens.astype(np.int64), device),
        to_device(group.scales[:, None].copy(), device),
        to_device(_cut(group.vectors, width), device),
        to_device(_cut(group.decoders, width), device),
        torch.zeros((size, width), dtype=torch.float32, device=device),
    )


def _copy(target: Tensor, values: NDArray[np.generic]) -> None:
    target.copy_(torch.from_numpy(np.ascontiguousarray(values)), non_blocking=True)


def _cut(vectors: F32, width: int) -> F32:
    """Vectors without padding, and with their last two columns."""
    return np.ascontiguousarray(
        np.concatenate((vectors[:, :width], vectors[:, -EXTRA_COLUMNS:]), axis=1)
    )
