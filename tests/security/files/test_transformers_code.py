"""Code that comes with a checkpoint never runs, whatever its configuration says (SEC-13; T4)."""

import json
from pathlib import Path

import pytest
import torch

from engine.backends.transformers.checkpoint import open_checkpoint
from engine.backends.transformers.loading import load_model
from engine.core.errors import EngineError, ModelFormatError
from tests.parity import tiny_models

CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass EvilConfig: pass\n"


def checkpoint(folder: Path, **changes) -> Path:
    """A llama whose folder holds code, and a configuration that points to it."""
    _, path = tiny_models.save("llama", folder)
    config = json.loads((path / "config.json").read_text())
    names = {
        "AutoConfig": "evil.EvilConfig",
        "AutoModelForCausalLM": "evil.EvilModel",
        "AutoModel": "evil.EvilModel",
    }
    (path / "config.json").write_text(json.dumps(config | {"auto_map": names} | changes))
    (path / "evil.py").write_text(CODE.format(marker=str(folder / "ran")))
    return path


def load(path: Path):
    return load_model(open_checkpoint(path), torch.device("cpu"), torch.float32)


def test_a_known_family_is_loaded_with_the_code_of_transformers(tmp_path):
    model = load(checkpoint(tmp_path))
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["evil", None, 3, ["llama"]])
def test_an_unknown_family_is_refused_without_running_its_code(tmp_path, kind):
    with pytest.raises(ModelFormatError, match="code that comes with a model is never run"):
        load(checkpoint(tmp_path, model_type=kind))
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_refused_and_not_initialized(tmp_path):
    from safetensors.torch import load_file, save_file

    path = checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"lacks 1 weights .*lm_head\.weight"):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "bert"},
        {"model_type": "clip"},
        {"hidden_size": 50},
        {"num_attention_heads": 0},
        {"num_hidden_layers": "many"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"rope_parameters": {"rope_type": "evil"}},
    ],
)
def test_an_inconsistent_configuration_is_a_one_line_error(tmp_path, changes):
    with pytest.raises(EngineError) as caught:
        load(checkpoint(tmp_path, **changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not (tmp_path / "ran").exists()
