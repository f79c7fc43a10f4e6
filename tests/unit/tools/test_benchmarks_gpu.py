"""The GPU benchmark on a tiny model and a CPU: its lists, its arithmetic, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.engine import BenchEngine, requests_of, shape_source, tokens_of
from benchmarks.gpu.pacing import Costs, Load, measure
from benchmarks.gpu.roof import H200, quantized, roof_seconds, weight_bytes
from benchmarks.gpu.run import Row, best_value, results_table
from benchmarks.gpu.workloads import FIGURES, SHAPES, Workload, workloads
from engine.core.errors import InferenceError
from engine.ipc.options import EngineOptions

TINY = SHAPES["tiny"]


def engine(**changes) -> BenchEngine:
    options = {"max_slots": 8, "max_batch_tokens": 64, "device": "cpu", **changes}
    options |= {"model_path": "tiny", "framework": "torch", "max_seq_len": 256}
    return BenchEngine("tiny", EngineOptions(**options))


def test_a_seed_always_gives_the_same_benchmark_prompts() -> None:
    lists = workloads(SHAPES["llama-1b"])
    assert [workload.num_prompt_tokens for workload in lists.values()] == [
        128,
        64 * 128,
        256 * 512,
        16 * 4096,
        256 * (2048 + 64),
        132_910,
        1024 * 128,
        32 * 7000,
    ]
    assert lists["single"].prompts[0][:3] == [111_680, 51_494, 100_346]
    assert lists["mixed256"].num_new[:3] == [176, 250, 413]


def test_repeats_share_no_prefix_and_a_shared_prefix_is_shared() -> None:
    first, second = (workloads(TINY, seed) for seed in (0, 1))
    for name, workload in first.items():
        shared = workload.num_shared
        assert len({tuple(prompt[:shared]) for prompt in workload.prompts}) == 1
        starts = {tuple(prompt[shared : shared + 4]) for prompt in workload.prompts}
        assert len(starts) == len(workload.prompts)
        assert workload.prompts[0][:4] != second[name].prompts[0][:4]


def test_the_roofline_reads_the_weights_once_per_step() -> None:
    config = shape_source("llama-1b").config
    assert weight_bytes(config) == pytest.approx(2 * 1.236e9, rel=1e-3)
    read_s = weight_bytes(config) / H200.bytes_per_s
    single = workloads(SHAPES["llama-1b"])["single"]
    assert roof_seconds(config, single) == pytest.approx(256 * read_s, rel=0.02)
    long = Workload([[1] * 4096] * 16, [1] * 16)
    layers = weight_bytes(config) / 2 - config.vocab_size * config.hidden_size
    flops = 2 * layers * 16 * 4096
    assert flops / H200.flops_per_s < roof_seconds(config, long) < 1.4 * flops / H200.flops_per_s


def test_the_roofline_counts_the_experts_that_a_step_reads() -> None:
    config = shape_source("qwen3-30b-a3b").config
    one, many = weight_bytes(config), weight_bytes(config, 64)
    assert one == pytest.approx(2 * 3.04e9, rel=0.01)  # without the embeddings
    assert many == pytest.approx(2 * 29.8e9, rel=0.01)  # nearly all experts
    long = Workload([[1] * 512] * 16, [1] * 16)
    read_s = 2 * 30.2e9 / H200.bytes_per_s
    assert roof_seconds(config, long) == pytest.approx(
        max(read_s, 2 * 2.73e9 * 512 * 16 / H200.flops_per_s), rel=0.05
    )


def test_a_shared_prefix_lowers_the_roofline_time() -> None:
    config = shape_source("llama-1b").config
    shared = workloads(SHAPES["llama-1b"])["prefix256"]
    apart = Workload(shared.prompts, shared.num_new)
    assert roof_seconds(config, shared) < 0.2 * roof_seconds(config, apart)


def test_every_workload_generates_all_of_its_tokens() -> None:
    bench = engine()
    for workload in workloads(TINY).values():
        run = bench.run(workload)
        assert [len(tokens) for tokens in tokens_of(run, workload)] == workload.num_new
        assert 0 < run.first_token_s <= run.seconds
        assert len(run.steps) >= max(workload.num_new)
        assert run.launch_s + run.wait_s < run.seconds
    bench.close()


def test_random_weights_are_the_same_at_every_start() -> None:
    prompts = workloads(TINY)["batch256"]
    first, again = engine(), engine(attention="reference")
    assert tokens_of(first.run(prompts), prompts) == tokens_of(again.run(prompts), prompts)


def test_a_failed_benchmark_request_raises() -> None:
    too_long = Workload([[5] * 300], [4])
    with pytest.raises(InferenceError, match="request 0 failed"):
        engine().generate(requests_of(too_long))


def test_speedups_above_one_are_better_for_rates_and_for_times() -> None:
    assert best_value("tiny", "single", [2.0, 1.0, 4.0]) == (8.0, 1)
    assert best_value("tiny", "prefix256", [2.0, 1.0, 4.0]) == (1.0, 1)
    rate = Row("single", "", "new tok/s", 1000.0, 500.0, None, 1250.0, True)
    assert (rate.ratio, rate.meets_bar) == (2.0, False)
    time = Row("prefix256", "", "s", 0.4, 0.8, 0.6, 0.4, False)
    assert (time.ratio, time.meets_bar) == (pytest.approx(1.5), True)
    assert results_table("tiny", [rate, time]).row_count == 2


@pytest.mark.seconds
def test_the_command_prints_a_table_and_writes_every_repeat(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--model", "tiny", "--device", "cpu"]
    command += ["--workloads", "single", "prefix256", "start", "--repeats", "2", "--no-vllm"]
    done = subprocess.run(
        [*command, "--output", str(out)], capture_output=True, text=True, check=True
    )
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["rows"]] == [
        "single",
        "prefix256",
        "start cold",
        "start warm",
    ]
    assert len(report["runs"]["single"]) == 2
    assert report["starts"]["warm"]["seconds"] > report["starts"]["warm"]["load_s"] > 0
    for row in report["rows"]:
        assert f"{row['name']}: " in done.stdout


def test_every_benchmark_figure_has_a_performance_bar() -> None:
    for figure in FIGURES.values():
        assert set(figure.vllm) == set(figure.bar)


def test_float8_halves_the_bytes_of_the_roofline() -> None:
    config = shape_source("llama-8b").config
    single = workloads(SHAPES["llama-8b"])["single"]
    plain, halved = (
        roof_seconds(config, single, quantized(H200, *kinds))
        for kinds in (("auto", "auto"), ("fp8", "fp8"))
    )
    assert halved == pytest.approx(plain / 2, rel=1e-3)


@pytest.mark.parametrize("varies", [False, True])
def test_even_steps_have_even_token_gaps_and_cost_little(varies: bool) -> None:
    """On a modelled GPU, whose clock is part of the model."""
    load, costs = Load(96, 128, 128, 3, varies), Costs(1.2e-3, 5e-6, 4e-6, 1e-4)
    large, even = (measure(load, costs, paces=paces) for paces in (False, True))
    assert even.gap_ratio < 2
    assert even.tokens_per_s > 0.95 * large.tokens_per_s
