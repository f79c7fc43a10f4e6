"""`engine profile` on tiny models, as a user types it: what it adds up, writes and refuses."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.gpu.workloads import SHAPES
from engine.cli.commands import app
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.tools.profiling import DrivenEngine
from engine.weights.random import open_random
from tests.support.files.gguf_files import random_weights, tiny_config
from tests.support.files.safetensors_files import hf_layout, write_model
from tests.support.files.tokenizer_files import write_directory

BACKENDS = ("torch", "native")
CONTEXT = 128


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights and a tokenizer."""
    path = write_directory(tmp_path / "model")
    config = tiny_config("llama", vocab_size=700, max_position=CONTEXT)
    write_model(path, config, hf_layout(config, random_weights(config)))
    return path


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A folder with a config only."""
    path = tmp_path / "shape"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(dict(SHAPES["tiny"].config)))
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["profile", *map(str, arguments), "--device", "cpu"])


def figures(*arguments: Any) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_profiled_phases_before_the_first_token_add_up(model: Path, backend: str) -> None:
    found = figures(model, "--backend", backend, "--prompt-tokens", 40, "--tokens", 5)
    assert (found["num_prompt_tokens"], found["num_new_tokens"]) == (40, 5)
    first = found["first_token"]
    parts = [first[f"{name}_s"] for name in ("tokenize", "queue", "prefill", "first_sample")]
    assert all(part >= 0 for part in parts)
    assert first["total_s"] == pytest.approx(sum(parts))
    assert found["num_steps"] >= 5


@pytest.mark.parametrize(
    ("backend", "matmul", "attention"),
    [("torch", "aten::mm", "scaled_dot_product"), ("native", "linear mlp.gate_up", "attention")],
)
def test_profiled_kernels_sum_to_the_time_of_one_run(
    model: Path, backend: str, matmul: str, attention: str
) -> None:
    found = figures(model, "--backend", backend, "--tokens", 4, "--prompt", "The quick fox")
    kernels = {kernel["name"]: kernel for kernel in found["kernels"]}
    seconds = [kernel["seconds"] for kernel in found["kernels"]]
    assert seconds == sorted(seconds, reverse=True)
    assert found["kernels_s"] == pytest.approx(sum(seconds))
    assert found["kernels_s"] <= 1.05 * found["recorded_s"]
    assert matmul in kernels
    assert any(attention in name for name in kernels)
    assert not any(name.startswith("engine: ") for name in kernels)


def test_native_profile_groups_steps_by_layer(model: Path) -> None:
    found = figures(model, "--backend", "native", "--tokens", 4, "--prompt-tokens", 8)
    calls = {kernel["name"]: kernel["calls"] for kernel in found["kernels"]}
    assert calls["embed"] == calls["sample"] == 4
    assert calls["attention"] == calls["linear mlp.down"] == 2 * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_profile_trace_is_chrome_trace_json(model: Path, backend: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run(model, "--backend", backend, "--tokens", 3, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert f"Trace: {trace}" in result.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    names = [event["name"].removeprefix("engine: ") for event in spans]
    assert names.count("forward") == names.count("sample") == names.count("wait") == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_profiling_with_random_weights_needs_only_a_config(shape: Path, backend: str) -> None:
    given = ("--load-format", "dummy", "--backend", backend, "--requests", 3, "--tokens", 2)
    found = figures(shape, *given, "--prompt-tokens", 20)
    assert found["first_token"]["tokenize_s"] is None
    assert (found["num_prompt_tokens"], found["num_new_tokens"]) == (60, 6)


def test_the_profile_table_names_its_rows(model: Path) -> None:
    result = run(model, "--backend", "native", "--tokens", 2, "--top", 3)
    assert result.exit_code == 0, result.output
    for words in ("native on cpu", "tokens in, 2 out", "time to first token", "first sample"):
        assert words in result.stdout
    assert "others" in result.stdout
    assert "share" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--prompt", "a", "--prompt-tokens", 3), "--prompt goes neither with"),
        (("--tokens", CONTEXT), "leave no room for a prompt"),
        (("--prompt-tokens", CONTEXT, "--tokens", 1), "exceed the context of 128"),
        (("--backend", "vllm"), "vllm"),
        (("--trace", "/nowhere/trace.json"), "there is no folder /nowhere"),
    ],
)
def test_invalid_profile_arguments_are_refused(model: Path, arguments: tuple, reason: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == 2, result.output
    assert reason in result.output


def test_random_weights_are_refused_for_a_gguf_file(model: Path) -> None:
    result = run(model / "model.safetensors", "--load-format", "dummy")
    assert result.exit_code == 2
    assert "reads a folder's config.json" in result.output


def test_profiled_call_times_show_where_a_call_was_delayed(shape: Path) -> None:
    """A call that is held up shows where it was held up, and nowhere else."""
    options = EngineOptions(model_path=str(shape), framework="torch", device="cpu")
    engine = DrivenEngine(open_random(shape), options)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    request = GenerateRequest(request_id="0", prompt=(1, 2, 3), params=params)
    engine.generate([request])
    delay = 0.2

    class Slow:
        def __init__(self, name: str) -> None:
            self._name = name

        def __enter__(self) -> None:
            if self._name == "sample":
                time.sleep(delay)

        def __exit__(self, *error: object) -> None:
            pass

    run = engine.generate([request], Slow)
    engine.close()
    assert [step.num_tokens for step in run.steps] == [3, 1]
    for step in run.steps:
        assert step.sample_s >= delay > step.forward_s
    assert run.seconds >= 2 * delay
    assert run.first_token_s < run.seconds
