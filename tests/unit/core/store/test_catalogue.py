"""Names become paths by lookup only, and what is not whole does not count as a model."""

import os
from pathlib import Path

import msgspec
import pytest

from engine.core.errors import NotFoundError
from engine.core.folders import store_directory
from engine.core.store.catalogue import CATALOGUE, DEFAULT_MODEL
from engine.core.store.model_store import (
    ModelStore,
    StoredModel,
    StoredModelFile,
    resolve_model,
)


def publish(store: ModelStore, name: str = "tiny", body: bytes = b"GGUFdata") -> Path:
    staging = store.staging(name)
    (staging / "tiny.gguf").write_bytes(body)
    (staging / ".tiny.gguf.state").write_bytes(b"{}")
    files = (StoredModelFile("tiny.gguf", len(body), "0" * 64),)
    return store.publish(staging, StoredModel(name, "test", "2026-01-01", files, "tiny.gguf"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.chdir(tmp_path)
    return ModelStore(tmp_path / "models")


def test_paths_win_over_stored_names_and_those_over_the_catalogue(
    store: ModelStore, tmp_path: Path
) -> None:
    path = publish(store)
    assert resolve_model("tiny", store) == path
    (tmp_path / "tiny").write_bytes(b"GGUF")
    assert resolve_model("tiny", store).samefile(tmp_path / "tiny")
    assert publish(store, DEFAULT_MODEL) == resolve_model(DEFAULT_MODEL, store)


def test_an_unknown_model_name_is_refused_with_a_suggestion(store: ModelStore) -> None:
    with pytest.raises(NotFoundError, match=f"engine pull {DEFAULT_MODEL}"):
        resolve_model(DEFAULT_MODEL, store)
    with pytest.raises(NotFoundError, match=f"did you mean '{DEFAULT_MODEL}'"):
        resolve_model(DEFAULT_MODEL.replace("-", "_"), store)


@pytest.mark.parametrize(
    "name", ["", "a\0b", "../models/tiny/nothing", "/nonexistent/x", "tiny/../tiny", "%2e%2e/x"]
)
def test_model_names_with_path_tricks_are_not_found(store: ModelStore, name: str) -> None:
    publish(store)
    with pytest.raises(NotFoundError):
        resolve_model(name, store)


def test_damaged_models_are_not_listed_and_can_be_pulled_again(store: ModelStore) -> None:
    path = publish(store)
    path.write_bytes(b"GG")
    assert store.models() == {}
    assert publish(store).read_bytes() == b"GGUFdata"
    (path.parent / "model.json").write_bytes(b'{"name": 3}')
    assert store.models() == {}


def test_store_records_cannot_point_out_of_their_folder(store: ModelStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret.gguf"
    secret.write_bytes(b"GGUFdata")
    path = publish(store)
    record = path.parent / "model.json"
    model = msgspec.json.decode(record.read_bytes(), type=StoredModel)
    outside = StoredModelFile("../../secret.gguf", 8, "0" * 64)
    changed = msgspec.structs.replace(model, files=(outside,), entry=outside.name)
    record.write_bytes(msgspec.json.encode(changed))
    assert store.models() == {}
    publish(store)
    path.unlink()
    path.symlink_to(secret)
    assert store.models() == {}
    publish(store)
    os.rename(path.parent, tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert store.models() == {}


def test_publishing_a_model_leaves_no_temporary_files(store: ModelStore) -> None:
    path = publish(store)
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.json", "tiny.gguf"]
    assert list(store.root.glob(".partial/*")) == []


def test_the_model_store_follows_xdg_data_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_directory() == tmp_path / "engine" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_directory() == tmp_path / ".cache" / "engine" / "models"


def test_the_default_model_has_a_pinned_hash_and_size() -> None:
    entry = CATALOGUE[DEFAULT_MODEL]
    assert entry.sha256 is not None and entry.size is not None
    assert entry.sources[0].startswith("pypi:") and entry.sources[1].startswith("hf:")
