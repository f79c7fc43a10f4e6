"""`engine inspect --graph` on tiny models: what it counts, folds, draws, times and refuses."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gguf
import jsonschema
import pytest
from typer.testing import CliRunner

from engine.architectures.base import EncoderConfig
from engine.cli.commands import app
from engine.core.errors import ConfigError, ModelFormatError
from engine.native.compiled import kernels
from engine.native.execution import build, timing
from engine.weights.model import ModelSource, open_model
from engine_tools.graph import report as graph_report
from engine_tools.graph.drawing import graph_dot, graph_svg
from engine_tools.graph.facts import BEFORE, Report, StepSize, by_nodes, fold
from engine_tools.graph.report import describe_graph
from engine_tools.graph.text import graph_text
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf

ONE = StepSize(1, 32, is_prompt=False)
FRAMEWORKS = ("torch", "jax", "tinygrad", "transformers")
LAYER_NODES, LAYER_STEPS = 17, 6
WANTED = 2  # nodes and steps more in the last layer: it goes on with the tokens that are read
COUNT = {"type": "integer", "minimum": 0}
NAMES = {"type": "array", "items": {"type": "string"}}
STEP_COUNTS = ("stored_bytes", "flops", "weight_bytes", "activation_bytes", "kv_bytes", "bytes")
WEIGHTS = {
    "type": "array",
    "items": {
        "required": ["name", "shape", "type", "bytes"],
        "properties": {"bytes": COUNT, "shape": {"type": "array", "items": COUNT}},
    },
}
SCHEMA = {
    "required": ["path", "family", "layers", "step", "nodes", "steps", "places", "totals"],
    "properties": {
        "step": {"required": ["tokens", "context", "is_prompt"]},
        "capacity": {"required": ["tokens", "logits"]},
        "nodes": {
            "items": {
                "required": ["name", "op", "layer", "inputs", "weights", "attributes", "shape"],
                "properties": {"inputs": NAMES, "weights": WEIGHTS},
            }
        },
        "steps": {
            "items": {
                "required": ["kind", "label", "layer", "nodes", "places", *STEP_COUNTS],
                "properties": {
                    "nodes": NAMES,
                    "weights": WEIGHTS,
                    "seconds": {"type": ["number", "null"]},
                    **dict.fromkeys(STEP_COUNTS, COUNT),
                },
            }
        },
        "places": {"items": {"required": ["floats", "per", "bytes"]}},
        "totals": {"additionalProperties": COUNT, "required": list(STEP_COUNTS)},
        "kinds": {"items": {"required": ["label", "seconds", "share", "gb_per_s", "gflop_per_s"]}},
    },
}


def save(path: Path, quantized: tuple[str, ...] = (), **changes: Any) -> Path:
    """A tiny llama as float32, but for the weights whose stored names are given: those are Q8_0."""
    config = tiny_config("llama", **{"num_layers": 3, **changes})
    stored: dict[str, Any] = gguf_layout(config, random_weights(config))
    for name in quantized:
        stored[name] = gguf.quants.quantize(stored[name], gguf.GGMLQuantizationType.Q8_0)
    write_gguf(path, config, stored)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("graph") / 'a <&> "b".gguf')


@pytest.fixture(scope="module")
def source(path: Path) -> Iterator[ModelSource]:
    source = open_model(path)
    yield source
    source.close()


@pytest.fixture(scope="module")
def report(source: ModelSource) -> Report:
    return describe_graph(source, ONE)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["inspect", *arguments])


def needs_kernels() -> None:
    try:
        kernels()
    except ConfigError:
        pytest.skip("the native kernels are not built")


def test_every_node_of_the_graph_belongs_to_a_plan_step(report: Report) -> None:
    assert len(report.nodes) == 1 + 3 * LAYER_NODES + WANTED + 2
    assert len(report.steps) == 1 + 3 * LAYER_STEPS + WANTED + 1
    done = [name for step in report.steps for name in step.nodes]
    assert sorted(done) == sorted(node.name for node in report.nodes)
    gated = next(step for step in report.steps if step.label == "linear mlp.gate_up")
    wanted = ["mlp_norm", "mlp.gate", "mlp.activation", "mlp.up", "mlp.gated"]
    assert gated.nodes == tuple(f"layers.0.{name}" for name in wanted)
    assert [weight.shape for weight in gated.weights] == [(64,), (96, 64), (96, 64)]
    assert gated.flops == 2 * 2 * 96 * 64


def test_graph_totals_are_sums_over_steps(report: Report, source: ModelSource) -> None:
    for key in ("flops", "weight_bytes", "activation_bytes", "kv_bytes", "bytes"):
        assert report.totals[key] == sum(getattr(step, key) for step in report.steps)
    assert report.totals["stored_bytes"] == source.size_bytes
    parts = ("weight_bytes", "activation_bytes", "kv_bytes")
    assert report.totals["bytes"] == sum(report.totals[key] for key in parts)
    assert report.arena_bytes == sum(place.bytes for place in report.places)
    used = {place for step in report.steps for place in step.places}
    assert used == set(range(len(report.places)))
    assert report.arena_bytes <= report.capacity_bytes


def test_graph_costs_follow_the_step_size(source: ModelSource, report: Report) -> None:
    eight = describe_graph(source, StepSize(8, 32, is_prompt=False))
    assert eight.totals["flops"] == 8 * report.totals["flops"]
    assert eight.totals["kv_bytes"] == 8 * report.totals["kv_bytes"]
    assert eight.totals["weight_bytes"] < 1.1 * report.totals["weight_bytes"]
    assert (eight.logits, eight.sequences, eight.capacity.tokens) == (8, 8, 8)
    prompt = describe_graph(source, StepSize(8, 8, is_prompt=True))
    assert (prompt.logits, prompt.sequences) == (1, 1)
    assert prompt.steps[-1].flops == report.steps[-1].flops, "one row of logits is wanted"


def test_equal_layers_are_shown_once(report: Report) -> None:
    before, layers, last, after = sections = fold(report)
    titles = ["", "layers 0 to 1: x 2", "layer 2: x 1", ""]
    assert [each.title for each in sections] == titles
    counts = [(len(each.nodes), len(each.steps)) for each in sections]
    of_layer = (LAYER_NODES, LAYER_STEPS)
    assert counts == [(1, 1), of_layer, tuple(count + WANTED for count in of_layer), (2, 1)]
    by_name = {node.name: node for node in layers.nodes}
    assert by_name["attn_norm"].inputs == (BEFORE,)
    assert by_name["attn.kv"].inputs[0] == "cache"
    wanted = next(node for node in last.nodes if node.name == "wanted")
    assert wanted.inputs == (BEFORE, "logit_tokens")
    text = graph_text(report)
    assert text.count("mlp.gate.weight F32 [96, 64]") == 2
    assert text.count("= mlp_norm + mlp.gate + mlp.activation + mlp.up + mlp.gated") == 2
    assert f"{report.totals['flops'] / 1e6:,.2f} MFLOP" in text


def test_layers_of_another_structure_are_shown_separately(tmp_path: Path) -> None:
    """Layer 1 stores its up matrix in another way, so gate and up cannot be one step there."""
    file = save(tmp_path / "m.gguf", quantized=("blk.1.ffn_up.weight",), num_layers=5)
    source = open_model(file)
    report = describe_graph(source, ONE)
    source.close()
    titles = ["", "layers 0, 2 to 3: x 3", "layer 1: x 1", "layer 4: x 1", ""]
    sections = fold(report)
    assert [section.title for section in sections] == titles
    steps = [1, LAYER_STEPS, LAYER_STEPS + 1, LAYER_STEPS + WANTED, 1]
    assert [len(section.steps) for section in sections] == steps
    gate, up = (step for step in sections[2].steps if "mlp.gated" in step.nodes)
    assert gate.nodes == up.nodes
    assert [weight.type for weight in up.weights] == ["F32", "Q8_0"]
    groups = by_nodes(sections[2])
    assert [steps for _, steps in groups if len(steps) == 2] == [[gate, up]]
    assert sum(len(nodes) for nodes, _ in groups) == LAYER_NODES


def test_json_output_lists_every_node_and_step(path: Path) -> None:
    result = run(str(path), "--graph", "--format", "json", "--context", "16")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    jsonschema.validate(report, SCHEMA)
    assert len(report["nodes"]) == 1 + 3 * LAYER_NODES + WANTED + 2, "nothing is folded"
    assert {step["layer"] for step in report["steps"]} == {None, 0, 1, 2}
    for key in ("flops", "bytes"):
        assert report["totals"][key] == sum(step[key] for step in report["steps"])
    assert report["kinds"] == [] and report["steps"][0]["seconds"] is None
    assert json.loads(run(str(path), "--graph", "--json", "--context", "16").stdout) == report


def test_the_svg_drawing_has_all_nodes_and_edges(report: Report) -> None:
    root = ElementTree.fromstring(graph_svg(report))
    space = "{http://www.w3.org/2000/svg}"
    kinds = [each.get("class") for each in root.iter() if each.tag != f"{space}text"]
    sections = fold(report)
    assert kinds.count("node") == sum(len(section.nodes) for section in sections)
    assert kinds.count("step") == sum(len(section.steps) for section in sections)
    assert kinds.count("section") == 2
    known = {node.name for section in sections for node in section.nodes} | {BEFORE}
    reads = [name for section in sections for node in section.nodes for name in node.inputs]
    assert kinds.count("edge") == sum(name in known for name in reads)
    height = int(root.get("height", "0"))
    boxes = [each for each in root.iter(f"{space}rect") if each.get("class")]
    assert all(int(box.get("y", "0")) + int(box.get("height", "0")) <= height for box in boxes)
    words = [each.text or "" for each in root.iter(f"{space}text")]
    assert any('a <&> "b".gguf' in line for line in words)
    assert "layers 0 to 1: x 2" in words


def test_dot_names_each_node_once_and_escapes(report: Report) -> None:
    text = graph_dot(report)
    assert text.count("{") == text.count("}")
    assert '<&> \\"b\\".gguf' in text
    made = re.findall(r'^ +("[^"]+") \[label=', text, re.MULTILINE)
    assert len(made) == len(set(made)) == 1 + 2 * LAYER_NODES + WANTED + 2
    ends = re.findall(r'^  ("[^"]+") -> ("[^"]+");$', text, re.MULTILINE)
    assert {end for edge in ends for end in edge} == set(made)


def test_measured_step_times_are_positive(path: Path, tmp_path: Path) -> None:
    needs_kernels()
    out = tmp_path / "times.json"
    for size in (["--tokens", "3"], ["--prompt", "--tokens", "20", "--context", "40"]):
        arguments = ["--graph", "--time", "--format", "json", "--output", str(out), *size]
        result = run(str(path), *arguments)
        assert result.exit_code == 0 and result.stdout == "", result.stderr
        report = json.loads(out.read_text())
        jsonschema.validate(report, SCHEMA)
        assert all(step["seconds"] > 0 for step in report["steps"])
        assert report["forwards"] >= 10 and report["forward_seconds"] > 0
        kinds = report["kinds"]
        assert sum(kind["steps"] for kind in kinds) == len(report["steps"])
        assert sum(kind["share"] for kind in kinds) == pytest.approx(1)
        spent = sum(step["seconds"] for step in report["steps"])
        assert sum(kind["seconds"] for kind in kinds) == pytest.approx(spent)
        for kind in kinds:
            assert kind["gb_per_s"] == pytest.approx(kind["bytes"] / kind["seconds"] / 1e9)


def test_steps_that_do_not_fit_in_memory_are_not_timed(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_kernels()
    device = replace(build.find_device("auto", "auto"), free_bytes=source.size_bytes + 10_000)
    monkeypatch.setattr(timing, "find_device", lambda *_: device)
    with pytest.raises(ConfigError, match="lower --tokens or --context"):
        describe_graph(source, StepSize(64, 48, is_prompt=False), timed=True)


def test_measured_times_are_shown_in_the_table(path: Path) -> None:
    needs_kernels()
    result = run(str(path), "--graph", "--time")
    assert result.exit_code == 0, result.stderr
    rows = dict(re.findall(r"^  (\S.*?\S)  +\d+  +([\d.]+)  +[\d.]+ %", result.stdout, re.M))
    assert {"embed", "attention", "linear logits", "linear attn.q_k_v", "all steps"} <= set(rows)
    parts = sum(float(ms) for label, ms in rows.items() if label != "all steps")
    assert parts == pytest.approx(float(rows["all steps"]), abs=0.001 * len(rows))


def test_without_kernels_everything_but_times_is_shown(
    source: ModelSource, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise ConfigError("the native kernels were not built")

    monkeypatch.setattr(build, "kernels", absent)
    monkeypatch.setattr(graph_report, "kernels", absent)
    bare = describe_graph(source, ONE)
    assert bare.instruction_set is None and "not built" in graph_text(bare)
    assert [step.nodes for step in bare.steps] == [step.nodes for step in report.steps]
    assert bare.totals["stored_bytes"] == report.totals["stored_bytes"]
    with pytest.raises(ConfigError, match="not built"):
        describe_graph(source, ONE, timed=True)


@pytest.mark.seconds
def test_graph_commands_load_no_framework(path: Path) -> None:
    code = (
        "import sys; from engine.cli.commands import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print([name for name in sys.modules if '.' not in name], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", "--graph", str(path), "--format", "svg"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.startswith("<svg"), done.stderr
    assert not [name for name in FRAMEWORKS if f"'{name}'" in done.stderr]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--graph", "--context", "49"], "beyond the model's 48 positions; lower --context"),
        (["--graph", "--prompt", "--tokens", "20", "--context", "10"], "raise it or lower"),
        (["--graph", "--tensors"], "do not go with --graph"),
        (["--graph", "--json", "--format", "dot"], "exclude each other"),
        (["--graph", "--output", "no/such/folder/x"], "--output no/such/folder/x cannot be"),
        (["--time"], "belong to --graph"),
        (["--format", "svg"], "belong to --graph"),
    ],
)
def test_invalid_graph_arguments_are_one_error_line(
    path: Path, arguments: list[str], says: str
) -> None:
    result = run(str(path), *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert says in result.stderr


def test_models_without_a_graph_are_refused_by_name(source: ModelSource) -> None:
    encoder = replace(source, config=replace(source.config, encoder=EncoderConfig(2, 64)))
    with pytest.raises(ConfigError, match=r"text encoder.*leave out --graph"):
        describe_graph(encoder, ONE)
    other = replace(source, config=replace(source.config, norm_placement="sum", family="mamba"))
    with pytest.raises(ModelFormatError, match=r"'mamba'; leave out --graph"):
        describe_graph(other, ONE)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3", "granite", "olmo2"])
def test_graphs_of_every_family_can_be_folded_and_drawn(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, num_layers=3)
    weights = random_weights(config)
    file = tmp_path / "m.gguf"
    write_gguf(file, config, gguf_layout(config, weights))
    source = open_model(file)
    report = describe_graph(source, ONE)
    source.close()
    titles = ["", "layers 0 to 1: x 2", "layer 2: x 1", ""]
    assert [section.title for section in fold(report)] == titles
    ElementTree.fromstring(graph_svg(report))
