"""Formats that carry code are refused by name and by content, wherever a model is named (SEC-12),
and no command line of ours lets a repository's code run (SEC-13; T4).
"""

import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from engine.backends.sglang import SGLangConfig
from engine.backends.vllm import VLLMConfig
from engine.core.errors import EngineError, ModelFormatError
from engine.weights.files import CODE_SUFFIXES
from engine.weights.model import open_model
from tests.support.files.gguf_files import tiny_config
from tests.support.files.safetensors_files import hf_config


def archive() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
    return held.getvalue()


def array() -> bytes:
    held = io.BytesIO()
    np.save(held, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return held.getvalue()


CONTENTS = {
    **{f"pickle {protocol}": pickle.dumps({"a": [1] * 50}, protocol) for protocol in (2, 3, 4, 5)},
    "zip": archive(),
    "array": array(),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(64),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_pickles_renamed_to_gguf_or_safetensors_are_refused(
    tmp_path: Path, name: str, content: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(CONTENTS[content])
    (folder / "config.json").write_text(json.dumps(hf_config(tiny_config("llama"))))
    for path in (folder, folder / name):
        with pytest.raises(ModelFormatError) as raised:
            open_model(path)
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("suffix", [*CODE_SUFFIXES, ".PT", ".Bin"])
def test_a_folder_with_only_pickled_weights_is_refused(tmp_path: Path, suffix: str) -> None:
    name = f"pytorch_model{suffix}"
    (tmp_path / name).write_bytes(CONTENTS["zip"])
    (tmp_path / "config.json").write_text(json.dumps(hf_config(tiny_config("llama"))))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(EngineError):
            open_model(path)


@pytest.mark.parametrize("kind", [VLLMConfig, SGLangConfig])
def test_option_values_cannot_become_flags_of_vllm_or_sglang(
    kind: type[VLLMConfig | SGLangConfig],
) -> None:
    evil = "--trust-remote-code"
    config = kind(model_name="a/b", served_model_name=evil, revision=evil, chat_template=evil)
    assert evil not in config.argv()
    with pytest.raises(EngineError):
        kind(model_name=evil).resolved_model()
