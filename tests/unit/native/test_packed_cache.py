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

from engine.weights.model import ModelSource, open_model
from tests.native.conftest import load_native
from tests.support.files.packed_models import content, load, make_model, plan_of

sys.modules.setdefault("engine.native._native", load_native())

from engine.native.weights import (  # noqa: E402
    cache,
    loading,
    packed_file,
)
from engine.native.weights.cache import PackedCache  # noqa: E402
from engine.native.weights.loading import (  # noqa: E402
    load_weights,
)

ROOT = Path(__file__).parents[3]


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


def test_the_second_start_maps_packed_weights(
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


def test_the_packed_cache_is_beside_the_model_store(
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
def test_a_changed_model_file_is_packed_again(
    model: Path, store: PackedCache, change: Callable[[Path], None]
) -> None:
    load(model, store)
    change(model)
    assert not load(model, store).from_cache
    assert load(model, store).from_cache
    assert len(list(store.directory.iterdir())) == 1, "it replaces the one before"


def test_a_changed_plan_or_format_version_is_packed_again(
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


def rewrite(path: Path, content: bytes) -> None:
    """As a disk that fails does it: the file's times stay."""
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        rewrite(path, data)

    return damage


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(packed_file.HEADER_BYTES + 12345)
        file.write(b"damage")


def claim(num_bytes: int) -> Callable[[Path], None]:
    """A header that is whole but lies about the size of what follows."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        key = data[8:40]
        sealed_s = int(path.stat().st_mtime)
        head = packed_file.PackedHeader(key, num_bytes, bytes(32), sealed_s).encode()
        rewrite(path, head + data[packed_file.HEADER_BYTES :])

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
    "data": write_into,
    "text": lambda path: path.write_text("not a packed file"),
    "link": replace_by_link,
    "pipe": replace_by_pipe,
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_packed_file_is_rewritten(
    model: Path, store: PackedCache, damage: Callable[[Path], None]
) -> None:
    expected = content(load(model, store))
    (path,) = store.directory.iterdir()
    damage(path)
    again = load(model, store)
    assert not again.from_cache and content(again) == expected
    mapped = load(model, store)
    assert mapped.from_cache and content(mapped) == expected


def test_verify_detects_changed_packed_data(model: Path, store: PackedCache) -> None:
    load(model, store)
    (path,) = store.directory.iterdir()
    flip(packed_file.HEADER_BYTES + 12345)(path)
    with pytest.raises(packed_file.PackedFileError, match="changed since"):
        packed_file.verify(path)


def test_a_failed_cache_write_keeps_the_previous_file(
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


def test_an_unwritable_cache_folder_only_warns(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        weights = load(model, PackedCache(tmp_path / "file" / "packed", free_share=1.0))
    assert not weights.from_cache and "not kept" in caplog.text


@pytest.mark.parametrize("limit", [{"max_bytes": 1000}, {"free_share": 0.0}])
def test_packed_weights_that_are_too_large_are_not_cached(
    model: Path, store: PackedCache, caplog: pytest.LogCaptureFixture, limit: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        load(model, PackedCache(store.directory, **({"free_share": 1.0} | limit)))
    assert list(store.directory.iterdir()) == [] and "too much" in caplog.text


def test_the_least_recently_used_packed_file_is_removed_first(
    tmp_path: Path, store: PackedCache
) -> None:
    models = [make_model(tmp_path / f"model{i}.gguf", seed=i) for i in range(3)]
    size = packed_file.HEADER_BYTES + load(models[0], None).num_bytes
    bounded = PackedCache(store.directory, max_bytes=2 * size, free_share=1.0)
    for index, path in enumerate(models[:2]):
        load(path, bounded)
        kept = next(store.directory.glob(f"model{index}-*"))
        os.utime(kept, ns=(index, kept.stat().st_mtime_ns))
    assert load(models[0], bounded).from_cache, "now the second is the older one"
    load(models[2], bounded)
    assert sorted(path.name[:6] for path in store.directory.iterdir()) == ["model0", "model2"]


def test_partial_files_of_a_killed_writer_are_removed(model: Path, store: PackedCache) -> None:
    store.directory.mkdir()
    old, new = store.directory / "a.packed.x.part", store.directory / "b.packed.y.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    load(model, store)
    assert not old.exists() and new.exists()


def test_a_model_replaced_during_packing_is_not_cached(
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


@pytest.mark.seconds
def test_concurrent_starts_pack_the_same_weights(model: Path, store: PackedCache) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from tests.unit.native import test_packed_cache as tests;"
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
