"""Packed weights: they hold the model's, and the cache on disk is used only when it is right."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.backends.custom.ir.plan import PackedMatrix
from engine.backends.custom.weights.model import ModelSource, open_model
from engine.core.errors import ModelFormatError
from tests.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf
from tests.native.conftest import load_native
from tests.safetensors_files import hf_layout, write_model

sys.modules.setdefault("engine.backends.custom.frameworks.native._native", load_native())

from engine.backends.custom.frameworks.native.weights import (  # noqa: E402
    cache,
    loading,
    packed_file,
)
from engine.backends.custom.frameworks.native.weights.cache import PackedCache  # noqa: E402
from engine.backends.custom.frameworks.native.weights.loading import (  # noqa: E402
    PackedWeights,
    load_weights,
)

ROOT = Path(__file__).parents[2]


def make_model(path: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Feed-forward sizes that are neither whole panels nor whole groups."""
    biases = {} if family == "gpt2" else {"qkv_bias": True, "mlp_bias": True}
    config = tiny_config(family, intermediate_size=88, **(biases | changes))
    weights = random_weights(config, seed)
    if family == "gpt2":
        write_model(path, config, hf_layout(config, weights))
    else:
        write_gguf(path, config, gguf_layout(config, weights))
    return path


def plan_of(source: ModelSource) -> tuple[list[PackedMatrix], list[str]]:
    """As a planner would fuse them: query, key and value together, gate and up interleaved."""
    groups = [("embed", False), ("head", False)]
    for layer in range(source.config.num_layers):
        place = f"layers.{layer}"
        if f"{place}.attn.qkv.weight" in source.weights:
            groups.append((f"{place}.attn.qkv", False))
        else:
            parts = (f"{place}.attn.{part}" for part in "qkv")
            groups.append((" ".join(parts), False))
        if f"{place}.mlp.gate.weight" in source.weights:
            groups.append((f"{place}.mlp.gate {place}.mlp.up", True))
        else:
            groups.append((f"{place}.mlp.up", False))
        groups += [(f"{place}.attn.o", False), (f"{place}.mlp.down", False)]
    matrices = []
    for names, interleaved in groups:
        parts = tuple(f"{name}.weight" for name in names.split())
        biases = tuple(f"{name}.bias" for name in names.split())
        shapes = [source.weights[part].spec.shape for part in parts]
        if biases[0] not in source.weights:
            biases = ()
        rows = sum(shape[0] for shape in shapes)
        matrices.append(PackedMatrix(names, parts, biases, interleaved, rows, shapes[0][1]))
    used = {part for matrix in matrices for part in (*matrix.parts, *matrix.biases)}
    return matrices, [name for name in source.weights if name not in used]


def load(model: Path, where: PackedCache | None, **options: Any) -> PackedWeights:
    """Load and wait for the file to be written."""
    source = open_model(model)
    weights = load_weights(source, *plan_of(source), threads=2, cache=where, **options)
    source.close()
    if weights.writer is not None:
        weights.writer.join()
    return weights


def content(weights: PackedWeights) -> list[bytes]:
    panels = [matrix.data.tobytes() for matrix in weights.matrices.values()]
    return panels + [v.tobytes() for v in (*weights.biases.values(), *weights.vectors.values())]


def in_rows(parts: list[NDArray[np.float32]], interleaved: bool) -> NDArray[np.float32]:
    """The parts' rows in the order of the matrix, and zeros up to whole panels."""
    if not interleaved:
        whole = np.concatenate(parts)
        return np.concatenate((whole, np.zeros((-len(whole) % 16, *whole.shape[1:]), np.float32)))
    padded = [in_rows([part], False).reshape(-1, 16, *part.shape[1:]) for part in parts]
    return np.stack(padded, axis=1).reshape(-1, *parts[0].shape[1:])


@pytest.fixture
def store(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", free_share=1.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model.gguf")


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each model that was packed, rather than mapped."""
    done: list[Path] = []
    original = loading.pack

    def counted(source: ModelSource, *arguments: Any) -> NDArray[np.uint8]:
        done.append(source.path)
        return original(source, *arguments)

    monkeypatch.setattr(loading, "pack", counted)
    return done


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("cached", [False, True])
def test_packed_weights_are_the_models(
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


def test_the_second_start_maps_and_packs_nothing(
    model: Path, store: PackedCache, packings: list[Path]
) -> None:
    first = load(model, store)
    second = load(model, store)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert len(packings) == 1
    assert content(second) == content(first)
    (path,) = store.directory.iterdir()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert [line[1] for line in maps if line[-1] == str(path)] == ["r--s"], "shared, read-only"
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.directory.stat().st_mode & 0o777 == 0o700
    packed_file.verify(path)


def test_without_a_cache_nothing_is_written(model: Path, tmp_path: Path) -> None:
    assert load(model, None).writer is None
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_the_cache_lies_beside_the_model_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PackedCache().directory == tmp_path / "engine" / "packed"


def change_time(model: Path) -> None:
    os.utime(model, ns=(0, model.stat().st_mtime_ns + 1))


def change_size(model: Path) -> None:
    before = model.stat()
    with model.open("ab") as file:
        file.write(bytes(32))
    os.utime(model, ns=(0, before.st_mtime_ns))


def change_header(model: Path) -> None:
    before = model.stat()
    model.write_bytes(model.read_bytes().replace(b"token3", b"tokem3", 1))
    os.utime(model, ns=(0, before.st_mtime_ns))


@pytest.mark.parametrize("change", [change_time, change_size, change_header])
def test_another_file_is_packed_again(
    model: Path, store: PackedCache, change: Callable[[Path], None]
) -> None:
    load(model, store)
    change(model)
    assert not load(model, store).from_cache
    assert load(model, store).from_cache
    assert len(list(store.directory.iterdir())) == 1, "it replaces the one before"


def test_another_plan_or_version_is_packed_again(
    model: Path, store: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, store)
    source = open_model(model)
    matrices, vectors = plan_of(source)

    def is_cached(*plan: Any) -> bool:
        weights = load_weights(source, *plan, threads=1, cache=store)
        if weights.writer is not None:
            weights.writer.join()
        return weights.from_cache

    assert is_cached(matrices, vectors)
    assert not is_cached(matrices[::-1], vectors)
    assert not is_cached(matrices, vectors)
    assert not is_cached(matrices, vectors[1:])
    assert not is_cached(matrices, vectors)
    monkeypatch.setattr(cache._native, "LAYOUT_VERSION", 10**6)
    assert not is_cached(matrices, vectors)


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return damage


def claim(num_bytes: int) -> Callable[[Path], None]:
    """A header that is whole but lies about the size of what follows."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        key = data[8:40]
        head = packed_file.Header(key, num_bytes, bytes(32)).encode()
        path.write_bytes(head + data[packed_file.HEADER_BYTES :])

    return damage


def replace_by_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half a header": lambda path: os.truncate(path, 100),
    "header alone": lambda path: os.truncate(path, packed_file.HEADER_BYTES),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte long": lambda path: os.truncate(path, path.stat().st_size + 1),
    "magic": flip(0),
    "key": flip(8),
    "size": flip(40),
    "data digest": flip(48),
    "header padding": flip(2000),
    "header digest": flip(packed_file.HEADER_BYTES - 1),
    "hostile size": claim(2**63),
    "size of nothing": claim(0),
    "text": lambda path: path.write_text("not a packed file"),
    "link": replace_by_link,
    "pipe": replace_by_pipe,
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_file_that_is_not_right_is_made_again(
    model: Path, store: PackedCache, damage: Callable[[Path], None]
) -> None:
    expected = content(load(model, store))
    (path,) = store.directory.iterdir()
    damage(path)
    again = load(model, store)
    assert not again.from_cache and content(again) == expected
    mapped = load(model, store)
    assert mapped.from_cache and content(mapped) == expected


def test_verify_reads_the_data(model: Path, store: PackedCache) -> None:
    load(model, store)
    (path,) = store.directory.iterdir()
    flip(packed_file.HEADER_BYTES + 12345)(path)
    with pytest.raises(packed_file.PackedFileError, match="changed since"):
        packed_file.verify(path)


def test_a_failed_write_leaves_what_was_there(
    model: Path,
    store: PackedCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(model, store)
    (path,) = store.directory.iterdir()
    before = path.read_bytes()
    change_time(model)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed_file.os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        weights = load(model, store)
    assert not weights.from_cache and "No space left" in caplog.text
    assert [each.read_bytes() for each in store.directory.iterdir()] == [before]


def test_a_place_that_cannot_be_written_only_warns(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        weights = load(model, PackedCache(tmp_path / "file" / "packed", free_share=1.0))
    assert not weights.from_cache and "not kept" in caplog.text


@pytest.mark.parametrize("limit", [{"max_bytes": 1000}, {"free_share": 0.0}])
def test_what_is_too_large_is_not_kept(
    model: Path, store: PackedCache, caplog: pytest.LogCaptureFixture, limit: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        load(model, PackedCache(store.directory, **({"free_share": 1.0} | limit)))
    assert list(store.directory.iterdir()) == [] and "too much" in caplog.text


def test_the_file_used_least_recently_goes_first(tmp_path: Path, store: PackedCache) -> None:
    models = [make_model(tmp_path / f"model{i}.gguf", seed=i) for i in range(3)]
    size = packed_file.HEADER_BYTES + load(models[0], None).num_bytes
    bounded = PackedCache(store.directory, max_bytes=2 * size, free_share=1.0)
    for index, path in enumerate(models[:2]):
        load(path, bounded)
        os.utime(next(store.directory.glob(f"model{index}-*")), (index, index))
    assert load(models[0], bounded).from_cache, "now the second is the older one"
    load(models[2], bounded)
    assert sorted(path.name[:6] for path in store.directory.iterdir()) == ["model0", "model2"]


def test_what_a_killed_writer_left_is_removed(model: Path, store: PackedCache) -> None:
    store.directory.mkdir()
    old, new = store.directory / "a.packed.x.part", store.directory / "b.packed.y.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    load(model, store)
    assert not old.exists() and new.exists()


def test_a_model_replaced_while_it_is_packed_is_not_kept(
    model: Path, store: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loading.pack

    def disturbed(*arguments: Any) -> NDArray[np.uint8]:
        arena = original(*arguments)
        change_time(model)
        return arena

    monkeypatch.setattr(loading, "pack", disturbed)
    assert load(model, store).writer is None
    assert not store.directory.exists()


def test_processes_that_start_together_do_no_harm(model: Path, store: PackedCache) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit import test_packed_cache as tests;"
        "store = tests.PackedCache(Path(sys.argv[2]), free_share=1.0);"
        "print(hash(b''.join(tests.content(tests.load(Path(sys.argv[1]), store)))))"
    )
    command = [sys.executable, "-c", code, str(model), str(store.directory)]
    settings = os.environ | {"PYTHONHASHSEED": "0"}
    children = [
        subprocess.Popen(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE) for _ in range(2)
    ]
    answers = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0] and len(answers) == 1
    (path,) = store.directory.iterdir()
    packed_file.verify(path)
    assert load(model, store).from_cache


def test_the_models_pages_are_let_go(model: Path, store: PackedCache) -> None:
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


def test_progress_ends_at_the_total(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.custom.frameworks.native.weights.packing._BATCH_BYTES", 1)
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
    matrix = PackedMatrix("query", ("layers.0.attn.q.weight",), (), False, 64, 64)
    with pytest.raises(ModelFormatError, match="'query' has a scale"):
        load_weights(source, [matrix], [], threads=1, cache=None)
