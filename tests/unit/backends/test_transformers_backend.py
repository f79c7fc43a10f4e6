"""What the transformers backend knows without loading anything: its options, and a checkpoint's
facts.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.backends.factory import make_backend
from engine.backends.transformers import TransformersBackend, TransformersConfig
from engine.backends.transformers.checkpoint import UNSTATED_CONTEXT, open_checkpoint, read_text
from engine.core.errors import ConfigError, EngineError, ModelFormatError
from tests.support.files.safetensors_files import file_bytes
from tests.support.files.tokenizer_files import TEMPLATE, write_directory

STATED = {"model_type": "gpt_neox", "vocab_size": 700, "hidden_size": 8}


def write(folder: Path, generation: dict | None = None, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(STATED | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tensors = {"embed": np.zeros((700, 8), np.float32), "norm": np.zeros(8, np.float32)}
    (folder / "model.safetensors").write_bytes(file_bytes(tensors))
    return folder


@pytest.mark.seconds
def test_importing_the_transformers_backend_loads_neither_torch_nor_transformers():
    code = "import sys, engine.backends.transformers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers"}.isdisjoint(done.stdout.split())


def test_transformers_options_become_engine_options():
    config = TransformersConfig(
        "m", dtype="bfloat16", max_slots=3, attention="own", backend_args={"block_size": 32}
    )
    options = TransformersBackend(config)._options
    assert (options.model_path, options.framework) == ("m", "transformers")
    assert (options.dtype, options.max_slots, options.attention) == ("bfloat16", 3, "own")
    assert options.block_size == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtyp": "float32"}, "did you mean dtype"),
        ({"max_slots": "many"}, "max_slots"),
        ({"backend_args": {"nonsense": 1}}, "'nonsense' is not one of"),
        ({"backend_args": {"dtype": "float32"}}, "'dtype' is not one of"),
        ({"backend_args": {"block_size": "x"}}, "block_size"),
    ],
)
def test_unknown_transformers_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        make_backend("transformers", "m", options)


def test_sizes_of_an_unknown_family_come_from_its_config_files(tmp_path):
    folder = write_directory(tmp_path / "m")
    write(folder, generation={"eos_token_id": [2, 1]}, n_positions=64)
    text = read_text(folder)
    assert (text.config.vocab_size, text.config.hidden_size) == (700, 8)
    assert text.config.max_position == 64
    assert text.config.num_params == 700 * 8 + 8 and text.size_bytes == 4 * 5608
    assert {1, 2} <= set(text.eos_ids)
    assert text.tokenizer.chat_template == TEMPLATE
    assert {"chat", "completions", "tools", "json_schema"} <= set(text.capabilities)


def test_text_config_of_a_multimodal_checkpoint_is_used(tmp_path):
    inner = {"vocab_size": 500, "max_position_embeddings": 32}
    shape = open_checkpoint(write(tmp_path / "m", text_config=inner)).shape
    assert (shape.vocab_size, shape.max_position) == (500, 32)
    assert open_checkpoint(write(tmp_path / "n")).shape.max_position == UNSTATED_CONTEXT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "lacks the required key 'vocab_size'"),
        ({"vocab_size": -4}, "'vocab_size' must be a positive number"),
        ({"hidden_size": "wide"}, "'hidden_size' must be a positive number"),
    ],
)
def test_an_inconsistent_checkpoint_config_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(write(tmp_path / "m", **changes))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_pickled_weights_are_never_opened(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(STATED))
    (tmp_path / name).write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(EngineError, match="carry code"):
            open_checkpoint(path)


def test_split_gguf_files_are_refused_with_advice_to_merge(tmp_path):
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match="merge them"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")
