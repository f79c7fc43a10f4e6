"""Safetensors headers that lie (SEC-43, SEC-12, SEC-13; T4). One case per rule, with its reason."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ModelError, ModelFormatError
from engine.weights.files import read_json
from engine.weights.model import open_model
from engine.weights.safetensors import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    open_safetensors,
)
from tests.support.files.gguf_files import random_weights, tiny_config
from tests.support.files.safetensors_files import assemble, hf_layout, write_model


def entry(begin: Any = 0, end: Any = 16, dtype: Any = "F32", shape: Any = (4,)) -> dict[str, Any]:
    stated = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": stated, "data_offsets": [begin, end]}


def opened(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    open_safetensors(path)


def test_the_unchanged_safetensors_file_is_read(tmp_path: Path) -> None:
    opened(tmp_path, assemble({"a": entry(), "b": entry(16, 32)}, bytes(32)))


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "too short": (b"\x01\x00", "too short"),
    "header past the end": (assemble({"a": entry()}, length=10**6), "header needs 1000000 bytes"),
    "header over the limit": (assemble({}, length=MAX_HEADER_BYTES + 1), "exceeds the limit"),
    "header length of 2**63": (assemble({}, length=2**63), "exceeds the limit"),
    "not JSON": (assemble(b"{nonsense}"), "not valid JSON"),
    "not an object": (assemble(b"[1, 2]"), "not a JSON object"),
    "nested without end": (assemble(b'{"a":' + b"[" * 10**5), "not valid JSON"),
    "integer of 5000 digits": (assemble(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "duplicate tensor": (
        assemble(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(16)),
        "'a' appears more than once",
    ),
    "duplicate field": (
        assemble(b'{"a":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
        "'dtype' appears more than once",
    ),
    "overlap": (assemble({"a": entry(), "b": entry(8, 24)}, bytes(24)), "'b'.* overlaps"),
    "gap": (assemble({"a": entry(), "b": entry(20, 36)}, bytes(36)), "'b'.* leaves a gap"),
    "gap at the start": (assemble({"a": entry(4, 20)}, bytes(20)), "'a'.* leaves a gap"),
    "past the end": (assemble({"a": entry()}, bytes(15)), "'a' ends at byte 16 .*truncated"),
    "trailing bytes": (assemble({"a": entry()}, bytes(17)), "1 bytes after the last tensor"),
    "negative offset": (assemble({"a": entry(-16, 0)}, bytes(16)), "not negative"),
    "reversed offsets": (assemble({"a": entry(16, 0)}, bytes(16)), "must be .begin, end"),
    "three offsets": (
        assemble({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}, bytes(16)),
        "must be .begin, end",
    ),
    "negative dimension": (assemble({"a": entry(shape=(-4,))}, bytes(16)), "none negative"),
    "fractional dimension": (assemble({"a": entry(shape=(4.0,))}, bytes(16)), "integers"),
    "boolean dimension": (assemble({"a": entry(0, 4, shape=(True,))}, bytes(4)), "integers"),
    "nine dimensions": (assemble({"a": entry(0, 4, shape=(1,) * 9)}, bytes(4)), "at most 8"),
    "product overflow": (assemble({"a": entry(shape=(2**32, 2**32, 0))}), "more values than"),
    "shape and size differ": (assemble({"a": entry(shape=(5,))}, bytes(16)), "16 bytes do not"),
    "dtype and size differ": (assemble({"a": entry(dtype="F16")}, bytes(16)), "16 bytes do not"),
    "unknown dtype": (assemble({"a": entry(dtype="F33")}, bytes(16)), "unknown dtype 'F33'"),
    "missing field": (assemble({"a": {"dtype": "F32", "shape": [4]}}), "exactly dtype, shape"),
    "unknown field": (assemble({"a": entry() | {"x": 1}}, bytes(16)), "exactly dtype, shape"),
    "entry is a number": (assemble({"a": 1}), "exactly dtype, shape"),
    "metadata is not strings": (assemble({"__metadata__": {"a": 1}}), "must map strings"),
    "pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.", "a pickle"),
    "torch zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "numpy": (b"\x93NUMPY\x01\x00" + bytes(60), "a numpy array"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_safetensors_are_refused_for_their_reason(tmp_path: Path, case: str) -> None:
    content, reason = DAMAGED[case]
    with pytest.raises(ModelFormatError, match=rf"model\.safetensors.*{reason}"):
        opened(tmp_path, content)


def test_a_header_length_that_looks_like_a_pickle_is_refused(tmp_path: Path) -> None:
    """0x0480 little-endian begins like pickle protocol 4; such files exist and are sound."""
    text = json.dumps({"a": entry()}).encode().ljust(0x0480)
    opened(tmp_path, assemble(text, bytes(16)))


@pytest.mark.parametrize(
    "header",
    [
        b"{" + b'"a":{},' * 2_000_000 + b'"b":{}}',
        b'{"a":[' + b"1," * 7_000_000 + b"1]}",
        b"{" + b",".join(b'"%d":{}' % n for n in range(MAX_TENSORS + 2)) + b"}",
    ],
    ids=["objects", "numbers", "tensors"],
)
def test_headers_built_to_fill_memory_are_refused_cheaply(tmp_path: Path, header: bytes) -> None:
    assert len(header) <= MAX_HEADER_BYTES
    path = tmp_path / "model.safetensors"
    path.write_bytes(assemble(header))
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError, match="more than 100000 tensors"):
            open_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npy", ".BIN"])
def test_formats_that_carry_code_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(assemble({"a": entry()}, bytes(16)))
    with pytest.raises(ModelFormatError, match="never loaded"):
        open_safetensors(path)


def test_config_files_are_size_limited(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{" + b" " * (17 * 2**20) + b"}")
    with pytest.raises(ModelFormatError, match="more than any model's"):
        read_json(tmp_path, "config.json")
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(ModelFormatError, match="'a' appears more than once"):
        read_json(tmp_path, "config.json")
    (tmp_path / "config.json").write_text(r'{"a": "\ud800"}')
    with pytest.raises(ModelFormatError, match="surrogates not allowed"):
        read_json(tmp_path, "config.json")
    with pytest.raises(ModelError, match="cannot read"):
        read_json(tmp_path, "absent.json")


def test_code_in_a_model_directory_is_never_run(tmp_path: Path) -> None:
    """Everything by which a repository asks for its own code, beside weights that are sound."""
    config = tiny_config("llama")
    directory = tmp_path / "model"
    asks = {
        "auto_map": {"AutoModelForCausalLM": "modeling_x.Model", "AutoConfig": "modeling_x.C"},
        "trust_remote_code": True,
        "_attn_implementation_internal": "modeling_x.attention",
        "text_config": {"auto_map": {"AutoModel": "modeling_x.Model"}, "trust_remote_code": True},
    }
    write_model(directory, config, hf_layout(config, random_weights(config)), **asks)
    canary = tmp_path / "canary"
    for name in ("modeling_x.py", "tokenizer.py", "config.py", "__init__.py", "sitecustomize.py"):
        (directory / name).write_text(f"open({str(canary)!r}, 'w')")
    assert open_model(directory).config == config
    assert not canary.exists()
