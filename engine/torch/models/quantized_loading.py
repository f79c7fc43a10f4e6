"""Loads the quantized matrices of a checkpoint into a model, without dequantizing them. The
matrices are repacked on the device.

Threads read and convert the stored bytes of the next matrices meanwhile: NumPy does not hold
Python's lock while it computes.

The parts of a fused layer may have different storage types. Neighbouring parts of the same layout
become one matrix. If any part of a layer is not quantized in the checkpoint, the layer stays a
plain `Linear`.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.torch.kernels.base import interpreting
from engine.torch.kernels.quantized import GroupedWeight, prepared
from engine.torch.kernels.repack import (
    REPACKED,
    layout_of,
    packed_bits,
    repack,
)
from engine.torch.layers.experts import Experts, GroupedExpertLinear
from engine.torch.layers.linear import Linear
from engine.torch.layers.quantized_linear import (
    GroupedEmbedding,
    GroupedLinear,
)
from engine.torch.models.base import Decoder
from engine.weights.grouped import Bytes
from engine.weights.weight import Weight

EMBED = "embed.weight"
_THREADS = min(16, os.cpu_count() or 1)  # as many matrices are in memory at once, and one more
SHRUNK_BITS = 8.5  # bits per value of int8 weights: 8, plus a 16-bit scale per 32 values


def keeps_quantized(weights: Mapping[str, object], device: torch.device) -> bool:
    """Whether any weight is quantized and the device has kernels for quantized weights."""
    has_kernels = device.type == "cuda" or interpreting()
    return has_kernels and any(_is_quantized(weight) for weight in weights.values())


def place_quantized(
    model: Decoder, weights: Mapping[str, object], device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Replaces layers of a model, which is on the meta device, by quantized layers on `device`.
    Returns the names of the weights that these layers contain.
    """
    taken = set()
    if _is_quantized(weights.get(EMBED)):
        table = prepared(_grouped(_stored(weights[EMBED]), device))
        model.set_submodule("embed", GroupedEmbedding(table, dtype))
        taken.add(EMBED)
        if model.config.tie_embeddings:
            model.set_submodule("head", GroupedLinear([table]))
    linears = [(path, module, _weight_names(path, module)) for path, module in _linears(model)]
    layers = [each for each in linears if all(_is_quantized(weights.get(n)) for n in each[2])]
    with ThreadPoolExecutor(_THREADS) as pool:
        matrices = _ahead(pool, (weights[name] for *_, names in layers for name in names))
        for path, module, names in layers:
            parts = [_grouped(next(matrices), device) for _ in names]
            layer = GroupedLinear(_stacked(parts), module.bias, module.parts)
            model.set_submodule(path, layer)
            taken.update(names)
    return taken | _place_experts(model, weights, device)


def _place_experts(model: Decoder, weights: Mapping[str, object], device: torch.device) -> set[str]:
    taken: set[str] = set()
    modules = [each for each in model.named_modules() if isinstance(each[1], Experts)]
    for path, experts in modules:
        if not _experts_are_kept(weights, path):
            continue
        for layer, names in (("gate_up", ("gate", "up")), ("down", ("down",))):
            stored = [weights[f"{path}.{name}.weight"] for name in names]
            plain = getattr(experts, layer)
            rows = _expert_rows(stored, device)
            setattr(experts, layer, GroupedExpertLinear(rows, plain.bias, plain.parts))
            taken.update(f"{path}.{name}.weight" for name in names)
    return taken


def _experts_are_kept(weights: Mapping[str, object], path: str) -> bool:
    """Whether the experts of a layer stay quantized. Gate and up must have the same layout, because
    they become one matrix.
    """
    stored = [weights.get(f"{path}.{name}.weight") for name in ("gate", "up", "down")]
    dtypes = [each.kernel_dtype for each in stored if isinstance(each, Weight)]
    if len(dtypes) < 3 or not all(dtype in REPACKED for dtype in dtypes):
        return False
    return layout_of(dtypes[0]) == layout_of(dtypes[1])


def _expert_rows(parts: list[object], device: torch.device) -> GroupedWeight:
    """One matrix with the rows of all experts. Each expert has the rows of all parts."""
    count = parts[0].spec.shape[0] if isinstance(parts[0], Weight) else 0
    experts = [
        _grouped(_stored(part.expert(index)), device)
        for index in range(count)
        for part in parts
        if isinstance(part, Weight)
    ]
    (rows,) = _stacked(experts)
    return rows


def placed_bytes(weights: Mapping[str, Weight], value_bytes: int, shrinks: bool) -> int:
    """Bytes of all weights on the device. A value that is not quantized takes `value_bytes`.

    With `shrinks`, matrices that are not quantized in the checkpoint will be quantized to 8 bits
    on loading. The embedding table will not.
    """
    total = 0.0
    for name, weight in weights.items():
        shape = weight.spec.shape
        bits: float = 8 * value_bytes
        is_kept = not weight.spec.of_experts or _experts_are_kept(weights, name.rsplit(".", 2)[0])
        if _is_quantized(weight) and is_kept:
            bits = packed_bits(weight.kernel_dtype)
        elif shrinks and len(shape) == 2 and name != EMBED:
            bits = SHRUNK_BITS
        total += prod(shape) * bits / 8
    return int(total)


def _is_quantized(weight: object) -> bool:
    return isinstance(weight, Weight) and weight.kernel_dtype in REPACKED


def _linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            yield path, module


def _weight_names(path: str, module: Linear) -> list[str]:
    if not module.parts:
        return [f"{path}.weight"]
    parent = path.rpartition(".")[0]
    return [f"{parent}.{part}.weight" for part, _ in module.parts]


class _Stored(NamedTuple):
    """A matrix in memory, as `Weight.kernel_rows` returns it."""

    dtype: str
    shape: tuple[int, int]
    raw: Bytes
    order: NDArray[np.intp] | None


def _stored(weight: object) -> _Stored:
    assert isinstance(weight, Weight), weight
    outputs, size = weight.spec.shape
    raw, order, _ = weight.kernel_rows()
    # Copied, because the mapped file is read-only, and a transfer to the device directly from it
    # would read its pages twice.
    raw = raw if raw.flags.writeable else raw.copy()
    return _Stored(weight.kernel_dtype, (outputs, size), raw, order)


def _ahead(pool: ThreadPoolExecutor, weights: Iterable[object]) -> Iterator[_Stored]:
    """Reads matrices in their order, a few of them at a time."""
    started: deque[Future[_Stored]] = deque()
    for weight in weights:
        started.append(pool.submit(_stored, weight))
        if len(started) > _THREADS:
            yield started.popleft().result()
    while started:
        yield started.popleft().result()


def _grouped(stored: _Stored, device: torch.device) -> GroupedWeight:
    grouped = repack(stored.dtype, torch.from_numpy(stored.raw).to(device), stored.shape)
    if stored.order is None:
        return grouped
    rows = torch.from_numpy(stored.order).to(device)
    return GroupedWeight(
        grouped.values[rows],
        grouped.scales[rows],
        None if grouped.minima is None else grouped.minima[rows],
        grouped.bits,
        grouped.group,
    )


def _stacked(parts: list[GroupedWeight]) -> Iterator[GroupedWeight]:
    for (bits, group, has_minima), alike in groupby(parts, key=lambda part: part.layout):
        same = list(alike)
        if len(same) == 1:
            yield same[0]
            continue
        minima = [part.minima for part in same if part.minima is not None]
        yield GroupedWeight(
            torch.cat([part.values for part in same]),
            torch.cat([part.scales for part in same]),
            torch.cat(minima) if has_minima else None,
            bits,
            group,
        )
