"""`engine pull`, `list` and `inspect` as a user types them."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from engine.architectures.base import ModelConfig, RopeConfig
from engine.cli.commands import app
from engine.cli.model_report import describe, human_bytes, print_report
from engine.core.store.catalogue import CATALOGUE, DEFAULT_MODEL
from engine.core.store.model_store import ModelStore, StoredModel, StoredModelFile
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import ModelSource
from tests.support.files import gguf_files

CONFIG = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position=512,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=RopeConfig(theta=1e4, dim=8),
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return ModelStore()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def publish(store: ModelStore, name: str, body: bytes) -> Path:
    staging = store.staging(name)
    (staging / "m.gguf").write_bytes(body)
    files = (StoredModelFile("m.gguf", len(body), "ab" * 32),)
    return store.publish(
        staging, StoredModel(name, "test:x", "2026-01-02T03:04:05", files, "m.gguf")
    )


def tensor(name: str, shape: tuple[int, ...], dtype: str, nbytes: int) -> LazyTensor:
    return LazyTensor(
        name, shape, dtype, nbytes, lambda: np.empty(0, np.uint8), lambda raw, to: raw
    )


def source(metadata: dict[str, Any]) -> ModelSource:
    tensors = [
        tensor("embed", (100, 32), "Q8_0", 3400),
        tensor("a", (32, 32), "Q4_1", 640),
        tensor("b", (64, 32), "Q4_1", 1280),
    ]
    checkpoint: Any = SimpleNamespace(
        tensors={each.name: each for each in tensors}, format="gguf", files=()
    )
    return ModelSource(Path("m.gguf"), CONFIG, checkpoint, {}, metadata)


def test_list_shows_pulled_models_before_the_catalogue(store: ModelStore) -> None:
    path = publish(store, "my-model", b"GGUFx")
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == ["my-model", *CATALOGUE]
    assert rows[0]["pulled"] and rows[0]["path"] == str(path) and rows[0]["size"] == 5
    assert [row["name"] for row in rows if row["default"]] == [DEFAULT_MODEL]
    assert all(row["fits"] is not None for row in rows)
    qwen = next(row for row in rows if row["name"] == "qwen3-4b")
    assert [quant["name"] for quant in qwen["quants"]] == ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    shown = run("list")
    assert shown.exit_code == 0 and "my-model" in shown.stdout and "(default)" in shown.stdout


def test_list_prints_each_model_on_one_line_of_at_most_80_columns(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list").stdout.rstrip().split("\n")
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert [line.split()[0] for line in lines[1:]] == list(CATALOGUE)


def test_pull_of_a_malformed_spec_is_one_error_line(store: ModelStore) -> None:
    result = run("pull", "nonsense")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: 'nonsense'") and result.stderr.count("\n") == 1


def test_a_pulled_model_is_not_fetched_again(store: ModelStore) -> None:
    staging = store.staging(DEFAULT_MODEL)
    (staging / "m.gguf").write_bytes(b"GGUF")
    entry = CATALOGUE[DEFAULT_MODEL]
    assert entry.sha256 is not None
    files = (StoredModelFile("m.gguf", 4, entry.sha256),)
    model = StoredModel(DEFAULT_MODEL, entry.sources[0], "2026", files, "m.gguf")
    path = store.publish(staging, model)
    result = run("pull", DEFAULT_MODEL)
    assert result.exit_code == 0 and result.stdout.strip() == str(path)


@pytest.mark.parametrize("body", [b"", b"GGUF", b"\x80\x04pickle", b"GGUF" + b"\xff" * 100])
def test_inspect_of_a_broken_file_is_one_error_line(store: ModelStore, body: bytes) -> None:
    Path("broken.gguf").write_bytes(body)
    result = run("inspect", "broken.gguf")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: broken.gguf") and result.stderr.count("\n") == 1


def test_a_model_that_cannot_run_is_shown_with_the_reason(store: ModelStore) -> None:
    header = gguf_files.entry("general.architecture", gguf_files.STRING, gguf_files.text("mamba"))
    tensors = [gguf_files.tensor("blk.0.ssm_a", [8])]
    Path("m.gguf").write_bytes(gguf_files.assemble([header], tensors, bytes(32)))
    result = run("inspect", "m.gguf", "--tensors")
    assert result.exit_code == 0
    assert "mamba (not supported)" in result.stdout and "blk.0.ssm_a" in result.stdout
    assert "'mamba' is not supported" in result.stderr and "--backend" in result.stderr
    report = json.loads(run("inspect", "m.gguf", "--json").stdout)
    assert (report["architecture"], report["supported"]) == ("mamba", False)
    assert report["tensors"][0]["shape"] == [8]
    assert run("inspect", "m.gguf", "--graph").exit_code == 1


def test_inspect_of_a_model_that_is_not_pulled_suggests_engine_pull(store: ModelStore) -> None:
    result = run("inspect", DEFAULT_MODEL)
    assert result.exit_code == 2 and f"engine pull {DEFAULT_MODEL}" in result.stderr


def test_the_inspect_report_sums_parameters_and_memory() -> None:
    report = describe(source({}), context=10, batch=3)
    assert report["parameters"] == 3200 + 1024 + 2048
    assert report["types"] == {
        "Q8_0": {"tensors": 1, "parameters": 3200, "bytes": 3400},
        "Q4_1": {"tensors": 2, "parameters": 3072, "bytes": 1920},
    }
    memory = report["memory"]
    assert memory["weights_as_stored"] == 5320
    # Two layers, keys and values, two heads of eight: 64 values a token.
    assert (memory["bfloat16"]["kv_per_token"], memory["float32"]["kv_per_token"]) == (
        256 // 2,
        256,
    )
    wide = 4 * report["parameters"]
    assert memory["float32"] == {
        "weights": wide,
        "kv_per_token": 256,
        "kv_cache": 256 * 30,
        "states": 0,
        "total": wide + 256 * 30,
    }


def test_hostile_metadata_is_escaped_in_text_and_json() -> None:
    metadata = {
        "general.name": "\x1b[2Jcleared\r\n[bold]x[/bold]",
        "bad": np.float32("nan"),
        "tokens": [str(number) for number in range(1000)],
        "types": np.zeros(1000, np.int32),
    }
    report = describe(source(metadata), context=1, batch=1)
    json.dumps(report, allow_nan=False)
    assert report["metadata"]["tokens"]["count"] == 1000
    console = Console(file=io.StringIO(), width=120)
    print_report(console, report, list_tensors=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "[bold]x[/bold]" in text
    assert "1,000 items" in text and "64 x 32" in text


def test_human_bytes_formats_sizes() -> None:
    sizes = [0, 999, 1000, 98_362_432, 999_999_999_999, 10**16]
    shown = ["0 B", "999 B", "1.0 kB", "98.4 MB", "1000.0 GB", "10000.0 TB"]
    assert [human_bytes(size) for size in sizes] == shown
