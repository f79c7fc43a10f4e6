"""Packed weights are the model's: every part in its place, and what cannot be packed is named."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.core.errors import ModelFormatError
from engine.ir.plan import PackedMatrix
from engine.weights.model import open_model
from tests.native.conftest import load_native
from tests.native.test_repack import decode
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf
from tests.support.files.packed_models import in_rows, load, make_model, plan_of

sys.modules.setdefault("engine.native._native", load_native())

from engine.native.weights.cache import PackedCache  # noqa: E402
from engine.native.weights.loading import (  # noqa: E402
    load_weights,
)


@pytest.fixture
def store(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", free_share=1.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("cached", [False, True])
def test_packed_weights_equal_the_models(
    tmp_path: Path, store: PackedCache, family: str, cached: bool
) -> None:
    """Reordered heads (GGUF), turned matrices (GPT-2), stacked and interleaved parts, tails."""
    path = make_model(tmp_path / ("model.gguf" if family == "llama" else "model"), family)
    if cached:
        load(path, store)
    weights = load(path, store)
    assert weights.from_cache is cached
    source = open_model(path)
    matrices, vectors = plan_of(source)
    for matrix in matrices:
        layout, rows, columns, data = weights.matrices[matrix.name]
        dense = data.view(np.float32).reshape(-1, -(-columns // 32), 32, 16)
        dense = dense.transpose(0, 3, 1, 2).reshape(len(dense) * 16, -1)
        expected = in_rows([source.weights[n].numpy() for n in matrix.parts], matrix.interleaved)
        assert layout == 7, "F32"
        assert rows == (len(expected) if matrix.interleaved else matrix.rows)
        np.testing.assert_array_equal(dense[:, :columns], expected)
        assert not dense[:, columns:].any()
        assert data.ctypes.data % 64 == 0 and not data.flags.writeable
        assert bool(matrix.biases) == (matrix.name in weights.biases)
        if matrix.biases:
            biases = [source.weights[name].numpy() for name in matrix.biases]
            expected = in_rows(biases, matrix.interleaved)
            np.testing.assert_array_equal(weights.biases[matrix.name], expected)
    assert list(weights.vectors) == vectors
    for name in vectors:
        np.testing.assert_array_equal(weights.vectors[name], source.weights[name].numpy())


def test_pages_of_the_model_file_are_released_after_packing(
    model: Path, store: PackedCache
) -> None:
    """Neither packing nor mapping leaves the checkpoint in our resident memory."""
    for _ in range(2):
        source = open_model(model)
        weights = load_weights(source, *plan_of(source), threads=1, cache=store)
        lines = Path("/proc/self/smaps").read_text().splitlines()
        (start,) = [index for index, line in enumerate(lines) if line.endswith(str(model))]
        resident = next(line for line in lines[start:] if line.startswith("Rss:"))
        assert resident.split() == ["Rss:", "0", "kB"]
        source.close()
        if weights.writer is not None:
            weights.writer.join()
    assert weights.from_cache


def test_packing_progress_ends_at_the_total(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.native.weights.loading._BATCH_BYTES", 1)
    calls: list[tuple[int, int]] = []
    weights = load(model, None, progress=lambda done, total: calls.append((done, total)))
    total = sum(matrix.data.size for matrix in weights.matrices.values())
    assert len(calls) == len(weights.matrices)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total) and {total for _, total in calls} == {total}


def q8_model(path: Path, damage: Callable[[NDArray[np.uint8]], None] | None = None) -> Path:
    """The query projection of the first layer is stored as Q8_0, everything else as floats."""
    config = tiny_config("llama")
    stored: dict[str, NDArray[Any]] = dict(gguf_layout(config, random_weights(config)))
    blocks = np.zeros((64, 2, 34), np.uint8)
    blocks[..., 2:] = np.arange(32)
    if damage is not None:
        damage(blocks)
    stored["blk.0.attn_q.weight"] = blocks.reshape(64, 68)
    write_gguf(path, config, stored)
    return path


def test_parts_of_different_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"attn\.q .*differ in layout.*Q8_0.*F32"):
        load(q8_model(tmp_path / "model.gguf"), None)


def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    def damage(blocks: NDArray[np.uint8]) -> None:
        blocks[1, 0, :2] = 0xFF  # not a number, in none of the blocks that opening looks at

    source = open_model(q8_model(tmp_path / "model.gguf", damage))
    matrix = PackedMatrix("query", ("layers.0.attn.q.weight",), (), False, 64, 64, "Q8")
    with pytest.raises(ModelFormatError, match="'query' has a scale"):
        load_weights(source, [matrix], [], threads=1, cache=None)


def test_types_without_kernels_are_converted_when_packed(
    tmp_path: Path, store: PackedCache
) -> None:
    """In GGUF, the rows of queries are reordered. The cache has what the first load packed."""
    config = tiny_config("llama", hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32)
    stored = gguf_layout(config, random_weights(config))
    name, kind = "blk.0.attn_q.weight", gguf.GGMLQuantizationType.TQ2_0
    types = {}
    for each in ("q", "k", "v"):
        place = f"blk.0.attn_{each}.weight"
        stored[place] = gguf.quants.quantize(stored[place], kind)
        types[place] = kind
    write_gguf(tmp_path / "model.gguf", config, stored, types=types)
    source = open_model(tmp_path / "model.gguf")
    assert source.checkpoint.tensors[name].dtype == "TQ2_0"
    packed = [load(tmp_path / "model.gguf", store) for _ in range(2)]
    assert packed[1].from_cache
    for weights in packed:
        found = weights.matrices["layers.0.attn.q layers.0.attn.k layers.0.attn.v"]
        dense, _ = decode(found.data, "Q4", 256)
        parts = [source.weights[f"layers.0.attn.{each}.weight"].numpy() for each in "qkv"]
        np.testing.assert_array_equal(dense, np.concatenate(parts))
