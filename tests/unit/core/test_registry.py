"""Registries: nothing is imported before it is asked for, packages can add, errors list names."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, ModelFormatError
from engine.core.registry.backend_registry import backend_class, backend_names
from engine.core.registry.model_registry import (
    architecture,
    architecture_for_gguf,
    architecture_for_hf,
    architecture_names,
)
from engine.core.registry.registry import Registry

PLUGIN = """
hf_names = ("ParrotForCausalLM",)
gguf_names = ("parrot",)

class ParrotBackend:
    pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on the path that adds one architecture, one backend and two broken ones."""
    (tmp_path / "parrot_plugin.py").write_text(PLUGIN)
    info = tmp_path / "parrot-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[engine.architectures]\nparrot = parrot_plugin\nllama = parrot_plugin\n"
        "[engine.backends]\nparrot = parrot_plugin:ParrotBackend\n"
        "absent = parrot_absent:Backend\nhollow = parrot_plugin:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "parrot_plugin", raising=False)


def test_registries_import_nothing_until_a_name_is_loaded() -> None:
    """In a fresh interpreter, since other tests have imported everything here."""
    program = (
        "import sys\n"
        "from engine.core.registry.model_registry import architecture_for_gguf\n"
        "from engine.core.registry.model_registry import architecture_names\n"
        "from engine.core.registry.backend_registry import backend_names\n"
        "assert 'llama' in architecture_names() and 'torch' in backend_names()\n"
        "loaded = [name for name in sys.modules if name.startswith('engine.backends')]\n"
        "assert not loaded, loaded\n"
        "architecture_for_gguf('llama')\n"
        "assert 'engine.architectures.llama' in sys.modules\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_builtin_family_is_found_by_all_its_names() -> None:
    names = architecture_names()
    assert {"llama", "gpt2", "gemma3", "gpt_oss", "bert"} <= set(names)
    for name in names:
        family = architecture(name)
        assert family.name == name
        for stated in family.hf_names:
            assert architecture_for_hf([stated]) is family
        for stated in family.gguf_names:
            assert architecture_for_gguf(stated) is family


@pytest.mark.usefixtures("installed")
def test_a_package_adds_an_architecture_and_a_backend() -> None:
    assert "parrot" in architecture_names()
    assert "parrot_plugin" not in sys.modules
    architecture_for_hf(["LlamaForCausalLM"])
    assert "parrot_plugin" not in sys.modules  # built-in families are asked first
    assert architecture_for_gguf("parrot") is architecture_for_hf(["ParrotForCausalLM"])
    assert "parrot" in backend_names()
    assert backend_class("parrot").__name__ == "ParrotBackend"


@pytest.mark.usefixtures("installed")
def test_a_package_cannot_take_a_builtin_name() -> None:
    assert architecture_names().count("llama") == 1
    assert architecture("llama").name == "llama"


@pytest.mark.usefixtures("installed")
def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown backend 'troch' \(known: .*torch.*parrot"):
        backend_class("troch")
    with pytest.raises(ModelFormatError, match="'mamba' is not supported.*--backend vllm"):
        architecture_for_gguf("mamba")
    with pytest.raises(ModelFormatError, match="MambaForCausalLM.*--backend transformers"):
        architecture_for_hf(["MambaForCausalLM"])
    with pytest.raises(ConfigError, match="'absent' cannot be loaded.*parrot_absent.*Install"):
        backend_class("absent")
    with pytest.raises(ConfigError, match="parrot_plugin has no 'Nothing'"):
        backend_class("hollow")


def test_two_packages_with_the_same_registered_name_are_refused(
    installed: None, tmp_path: Path
) -> None:
    info = tmp_path / "second-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[engine.backends]\nparrot = second_plugin:Backend\n")
    with pytest.raises(ConfigError, match="more than one installed package.*second_plugin"):
        backend_class("parrot")


def test_a_registry_target_is_a_module_or_an_attribute_of_one() -> None:
    registry = Registry("thing", {"path": "pathlib:Path", "json": "json"}, "engine.none")
    assert registry.load("path") is Path
    assert registry.load("json").__name__ == "json"
