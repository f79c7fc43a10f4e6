"""Loads packed weights for the kernels. If the cache on disk has the packed weights, they are
mapped from there. Otherwise the model's weights are packed, and the result is written to the cache.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelFormatError
from engine.native import _native
from engine.native.weights.arena import (
    ArenaPlan,
    MatrixParts,
    Panels,
    plan_arena,
    stacked_bias,
)
from engine.native.weights.cache import PackedCache, cache_key
from engine.weights.model import ModelSource
from engine.weights.weight import Weight

Progress = Callable[[int, int], None]  # arguments: bytes packed so far, total bytes

# Weights are packed in batches of about this size. After each batch, progress is reported, and the
# pages of the model's files that the batch read are released.
_BATCH_BYTES = 32 * 1024 * 1024


def pack(
    source: ModelSource,
    matrices: Sequence[MatrixParts],
    plan: ArenaPlan,
    threads: int,
    progress: Progress | None = None,
) -> NDArray[np.uint8]:
    """Packs all weights into one arena, as `plan` says, and returns the arena as a read-only array.
    Afterwards no pages of the model's files are resident.
    """
    arena = _fresh_memory(plan.num_bytes)
    for name, place in plan.vectors.items():
        plan.floats(arena, place)[...] = source.weights[name].numpy()
    done = 0
    for batch in _batches(matrices, plan):
        jobs: list[tuple[str, tuple[Any, ...]]] = []
        for matrix in batch:
            if matrix.biases:
                plan.floats(arena, plan.biases[matrix.name])[...] = stacked_bias(source, matrix)
            jobs += [(matrix.name, job) for job in _jobs(source, matrix, plan, arena)]
        refused = _native.repack([job for _, job in jobs], threads)
        if refused is not None:
            raise ModelFormatError(
                f"{source.path.name}: '{jobs[refused][0]}' has a scale that is not finite or "
                "too large for half precision; the file is damaged"
            )
        let_go(source)
        done += sum(plan.matrices[matrix.name].num_bytes for matrix in batch)
        if progress is not None:
            progress(done, sum(place.num_bytes for place in plan.matrices.values()))
    arena.flags.writeable = False
    return arena


def _fresh_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Allocates zeroed memory. The memory uses huge pages if the system has them, for fewer page
    faults and TLB misses.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)


def _batches(matrices: Sequence[MatrixParts], plan: ArenaPlan) -> Iterator[list[MatrixParts]]:
    batch: list[MatrixParts] = []
    room = _BATCH_BYTES
    for matrix in matrices:
        batch.append(matrix)
        room -= plan.matrices[matrix.name].num_bytes
        if room <= 0:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _jobs(
    source: ModelSource, matrix: MatrixParts, plan: ArenaPlan, arena: NDArray[np.uint8]
) -> Iterator[tuple[Any, ...]]:
    """The packing jobs of a matrix: one, or one per expert."""
    place = plan.matrices[matrix.name]
    weights = [source.weights[name] for name in matrix.parts]
    outs = plan.bytes_of(arena, place).reshape(max(1, matrix.experts), -1)
    for expert, out in enumerate(outs):
        parts = [_part(each.expert(expert) if matrix.experts else each) for each in weights]
        yield (place.layout, place.columns, matrix.interleaved, parts, out)


def _part(weight: Weight) -> tuple[Any, ...]:
    raw, order, transposed = weight.kernel_rows()
    return (weight.kernel_dtype, raw, weight.spec.shape[0], order, transposed)


def let_go(source: ModelSource) -> None:
    """Releases the pages of the model's files that were read. Pages that are not released count as
    memory of this process.
    """
    for file in source.checkpoint.files:
        if isinstance(file.buffer, mmap.mmap):
            file.buffer.madvise(mmap.MADV_DONTNEED)


_LEAST_URGENT = 19


class PackedWeights(msgspec.Struct, frozen=True):
    """The packed weights by name, as read-only views. A bias has the name of its matrix. Its length
    is padded to a multiple of 16, as the matrix's rows are.
    """

    matrices: dict[str, Panels]
    biases: dict[str, NDArray[np.float32]]
    vectors: dict[str, NDArray[np.float32]]
    num_bytes: int
    from_cache: bool
    writer: threading.Thread | None  # writes the cache file; None: no file is written


def load_weights(
    source: ModelSource,
    matrices: Sequence[MatrixParts],
    vectors: Sequence[str],
    *,
    threads: int,
    cache: PackedCache | None,
    progress: Progress | None = None,
) -> PackedWeights:
    """Maps the packed weights from the cache, or packs them if the cache does not have them.
    Afterwards the pages of the model's files are released, and the source may be closed.
    """
    plan = plan_arena(source, matrices, vectors)
    key = cache_key(source, matrices, plan) if cache is not None else None
    path = cache.path_for(source) if cache is not None else None
    arena = cache.open(path, key, plan.num_bytes) if cache and path and key else None
    from_cache, writer = arena is not None, None
    if arena is None:
        arena = pack(source, matrices, plan, threads, progress)
        # If a model file was replaced during packing, the key does not belong to these weights.
        if cache and path and key and cache_key(source, matrices, plan) == key:
            writer = _write_behind(cache, path, key, arena)
    let_go(source)
    return _views(plan, arena, from_cache, writer)


def _write_behind(
    cache: PackedCache, path: Path, key: bytes, arena: NDArray[np.uint8]
) -> threading.Thread:
    """Starts a thread of the lowest CPU priority that writes the cache file while the model already
    serves requests.
    """

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
