"""Loads weights for the kernels: mapped from the cache if present, else packed and cached."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.frameworks.native.weights.arena import (
    ArenaPlan,
    MatrixParts,
    Panels,
    plan_arena,
)
from engine.backends.custom.frameworks.native.weights.cache import PackedCache, cache_key
from engine.backends.custom.frameworks.native.weights.packing import Progress, let_go, pack
from engine.backends.custom.weights.model import ModelSource

_LEAST_URGENT = 19


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Read-only views by name. Biases are keyed by their matrix and padded like its rows."""

    matrices: dict[str, Panels]
    biases: dict[str, NDArray[np.float32]]
    vectors: dict[str, NDArray[np.float32]]
    num_bytes: int
    from_cache: bool
    writer: threading.Thread | None  # alive while the cache file is being written


def load_weights(
    source: ModelSource,
    matrices: Sequence[MatrixParts],
    vectors: Sequence[str],
    *,
    threads: int,
    cache: PackedCache | None,
    progress: Progress | None = None,
) -> PackedWeights:
    """Packs or maps all weights. The source may be closed afterwards; its pages are released."""
    plan = plan_arena(source, matrices, vectors)
    key = cache_key(source, matrices, plan) if cache is not None else None
    path = cache.path_for(source) if cache is not None else None
    arena = cache.open(path, key, plan.num_bytes) if cache and path and key else None
    from_cache, writer = arena is not None, None
    if arena is None:
        arena = pack(source, matrices, plan, threads, progress)
        # If a file was replaced meanwhile, the key no longer describes these weights.
        if cache and path and key and cache_key(source, matrices, plan) == key:
            writer = _write_behind(cache, path, key, arena)
    let_go(source)
    return _views(plan, arena, from_cache, writer)


def _write_behind(
    cache: PackedCache, path: Path, key: bytes, arena: NDArray[np.uint8]
) -> threading.Thread:
    """Writes the cache file while the model is served, at the lowest CPU priority."""

    def write() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_URGENT)
        cache.write(path, key, arena)

    writer = threading.Thread(target=write, name="packed-weights-writer", daemon=True)
    writer.start()
    return writer


def _views(
    plan: ArenaPlan, arena: NDArray[np.uint8], from_cache: bool, writer: threading.Thread | None
) -> PackedWeights:
    return PackedWeights(
        matrices={
            name: Panels(place.layout, place.rows, place.columns, plan.bytes_of(arena, place))
            for name, place in plan.matrices.items()
        },
        biases={name: plan.floats(arena, place) for name, place in plan.biases.items()},
        vectors={name: plan.floats(arena, place) for name, place in plan.vectors.items()},
        num_bytes=plan.num_bytes,
        from_cache=from_cache,
        writer=writer,
    )
