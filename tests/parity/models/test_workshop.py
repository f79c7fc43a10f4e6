"""The scripts in `engine/scripts` on tiny weights, started as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.cli.dev import SCRIPTS
from engine.conversion.convert import open_source
from engine.core.text.tokenizer import Tokenizer
from engine.tools.inspection import first_layers, frameworks, layer_outputs
from engine.weights.model import open_model
from engine_tools.dev import (
    benchmark_layers,
    finetune_tiny,
    profile_inference,
    single_file_gpt2,
    single_file_llama,
    test_gpt2_equivalence,
)
from engine_tools.dev.test_gpt2_equivalence import FAMILIES, save_tiny
from engine_tools.reference import monolithic_gpt2
from tests.parity import tiny_models
from tests.support.files import tokenizer_files
from tests.support.files.checkpoint_folders import write_hf, write_llama2c

FOLDER = Path(single_file_gpt2.__file__).parent
IDS = [5, 17, 101, 3, 44, 9, 200, 61]
FRAMEWORKS = ("native", "torch", "jax", "tinygrad")
# tinygrad compiles anew for each layer; `test_tinygrad_models.py` compares the layers of all kinds.
MATRIX = [
    *tiny_models.in_frameworks(FAMILIES, FRAMEWORKS[:3], {"jax": ("gpt2", "llama")}),
    *tiny_models.in_frameworks(("gpt2",), ("tinygrad",), {"tinygrad": ()}),
    *(pytest.param(each, "tinygrad", marks=pytest.mark.slow) for each in FAMILIES[1:]),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads crawl where other processes share the cores."""
    torch.set_num_threads(1)


def test_all_frameworks_are_importable_for_the_comparison() -> None:
    here, missing = frameworks()
    assert set(here) == set(FRAMEWORKS), missing


@pytest.mark.parametrize(("family", "framework"), MATRIX)
def test_every_layer_of_every_framework_equals_transformers(
    family: str, framework: str, tmp_path: Path
) -> None:
    model = save_tiny(family, tmp_path, num_layers=2)
    report = test_gpt2_equivalence.compare(family, model, tmp_path, IDS, [framework])
    found = report.found[framework]
    assert report.first_diverging(framework) is None, found
    assert {site for site in report.sites if site.startswith("served.")} <= found.keys()
    if framework in ("native", "torch"):
        assert found.keys() == set(report.sites)


def test_the_first_diverging_layer_is_named(tmp_path: Path) -> None:
    """A wrong bias in the second layer's attention shows there, and not before."""
    model = save_tiny("gpt2", tmp_path, num_layers=3)
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.bias[0] += 0.01
    report = test_gpt2_equivalence.compare("gpt2", model, tmp_path, IDS, ("native", "torch"))
    assert report.first_diverging("native") == report.first_diverging("torch") == "layers.1.attn"
    assert report.first_diverging("reference") is None, "it was given the changed weights"
    assert not report.agrees


def test_the_comparison_prints_a_table_and_exits_0_if_frameworks_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        test_gpt2_equivalence.main(["--length", "6", "--frameworks", "native", "torch"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"reference: agrees", "native: agrees", "torch: agrees"} <= set(lines)
    assert any(line.startswith("served.logprobs") for line in lines)


def test_a_model_cut_to_its_first_layers_is_not_cached_as_the_whole_model(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    source = open_model(tmp_path)
    part = first_layers(source, 1)
    assert part.config.num_layers == 1
    assert part.checkpoint.files == []
    assert {name for name in part.weights if name.startswith("layers.")} == {
        name for name in source.weights if name.startswith("layers.0.")
    }
    whole = layer_outputs("native", source, IDS)
    alone = layer_outputs("native", part, IDS)
    assert np.array_equal(whole["served.layers.0"], alone["served.layers.0"])


def test_single_file_gpt2_logits_equal_transformers(tmp_path: Path) -> None:
    theirs = save_tiny("gpt2", tmp_path)
    model = single_file_gpt2.load(tmp_path)
    model.forward(IDS[:3])
    logits = model.forward(IDS[3:])
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected[-1], atol=1e-4)
    weights = {name: value.numpy() for name, value in theirs.state_dict().items()}
    oracle = monolithic_gpt2.layer_outputs(weights, IDS, theirs.config.n_head)
    np.testing.assert_allclose(oracle["logits"], expected, atol=1e-4)
    model.reset()
    greedy = list(single_file_gpt2.generate(model, IDS, 8, 0, 0, 0))
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor([IDS]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    assert found[0, len(IDS) :].tolist() == greedy


def test_single_file_gpt2_tokenizes_like_the_library(tmp_path: Path) -> None:
    engine = tokenizer_files.byte_level_engine()
    engine.model.save(str(tmp_path))
    ours = single_file_gpt2.Tokenizer.load(tmp_path)
    assert ours is not None
    for text in (*tokenizer_files.CORPUS[:6], "½ ² Ⅷ  x\n\n y", "it's IT'S 'twas", "e\u0301 _a_"):
        ids = engine.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids).decode() == text


def test_single_file_llama_generates_the_same_text_as_the_engine(tmp_path: Path) -> None:
    write_llama2c(tmp_path / "c", tied=False)
    path = tmp_path / "c" / "model.bin"
    source = open_source(path)
    tokenizer = single_file_llama.Tokenizer.load(path.with_name("tokenizer.bin"))
    theirs = Tokenizer.from_gguf(source.metadata)
    for text in (*tokenizer_files.CORPUS[:3], "fox", ""):
        assert tokenizer.encode(text) == theirs.encode_prompt(text)
    model = single_file_llama.Llama.load(path)
    model.forward(IDS[:2])
    logits = model.forward(IDS[2:])
    expected = layer_outputs("torch", source, IDS)["logits"][-1]
    np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_scripts_run_as_files_and_as_commands(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "single_file_gpt2.py", "--tokens", "3", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    command = ["dev", "single_file_gpt2", "--tokens", "3", "--seed", "1"]
    assert CliRunner().invoke(app, command).stdout == done.stdout
    assert len(done.stdout.partition("->")[2].split()) == 3
    told = CliRunner().invoke(app, ["dev", "single_file_llama", "--tokens", "3"]).stdout
    assert len(told.partition("->")[2].split()) <= 3
    assert all((FOLDER / f"{name}.py").is_file() for name in SCRIPTS)


def test_single_file_scripts_stay_short() -> None:
    for name in ("single_file_gpt2", "single_file_llama"):
        lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) < 260
        assert not any("import engine" in line or "from engine" in line for line in lines)


def test_benchmark_layers_prints_times_and_draws_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--hidden", "64", "--vocab", "64", "--tokens", "2", "5", "--repeats", "2"]
    only = ["--frameworks", "torch", "--json", "--plot", str(tmp_path / "layers.png")]
    benchmark_layers.main([*sizes, *only])
    found = json.loads(capsys.readouterr().out.partition("plot:")[0])
    assert [row["tokens"] for row in found["times"]] == [2, 5]
    for row in found["times"]:
        assert set(benchmark_layers.LAYERS) == row["seconds"].keys()
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_profile_inference_writes_a_page_and_a_trace(tmp_path: Path) -> None:
    sizes = ["--prompt-tokens", "6", "--tokens", "3", "--output", str(tmp_path)]
    profile_inference.main([*sizes, "--frameworks", "native"])
    page = (tmp_path / "index.html").read_text()
    assert "time to first token" in page
    assert "<h2>native</h2>" in page
    assert json.loads((tmp_path / "native.trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_profile_inference_skips_frameworks_without_a_profiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompt-tokens", "6", "--tokens", "3", "--output", str(tmp_path)]
    profile_inference.main([*sizes, "--frameworks", "tinygrad", "native"])
    assert "tinygrad: the tinygrad backend has no profile" in capsys.readouterr().out
    assert "<h2>native</h2>" in (tmp_path / "index.html").read_text()


def test_a_fine_tuned_model_has_learned_and_is_served(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "gpt2", spread=0.1)
    text = "The quick brown fox jumps over the lazy dog"
    done = finetune_tiny.finetune(
        tmp_path / "hf", [text], "The quick brown", tmp_path / "tuned", steps=30, rate=1e-2
    )
    assert done.gradient.measured == pytest.approx(done.gradient.norm, rel=0.05)
    assert done.losses[-1] < 0.1 < 1 < done.losses[0]
    assert done.after.startswith(" fox jumps over the lazy dog")
    assert not done.before.startswith(" fox jumps")
