"""The GPU suite on a tiny model and a CPU: its checks pass, and a broken kernel fails them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu import correctness
from benchmarks.gpu.correctness import (
    NUM_PROMPTS,
    REFERENCE,
    common_length,
    drift,
    drift_checks,
    greedy_check,
    prompts,
)
from benchmarks.gpu.suite import ROOT, Outcome, Stage, run, stages, summary, told
from benchmarks.gpu.workloads import SHAPES


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """On one thread: more of them wait for each other where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(correctness, "NUM_PROMPTS", 24)
    yield 24
    torch.set_num_threads(threads)


@pytest.mark.seconds
def test_the_gpu_path_agrees_with_the_reference(few_prompts: int) -> None:
    checks = [greedy_check("tiny", "cpu", "auto"), *drift_checks("tiny", "cpu", "auto")]
    assert [check.name for check in checks if not check.passed] == []
    assert f"{few_prompts} of {few_prompts} prompts equal" in checks[0].detail


@pytest.mark.seconds
def test_slightly_wrong_attention_is_detected(
    few_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: 1.02 * right(*args, **kwargs)
    )
    greedy, *drifts = [
        greedy_check("tiny", "cpu", "sdpa"),
        *drift_checks("tiny", "cpu", "sdpa"),
    ]
    assert not greedy.passed
    assert "differs from token" in greedy.detail
    assert not any(check.passed for check in drifts)
    assert greedy_check("tiny", "cpu", REFERENCE).passed


def test_prompts_have_many_lengths_and_some_share_a_prefix() -> None:
    lists = prompts(SHAPES["llama-1b"]).prompts
    assert len(lists) == NUM_PROMPTS
    assert len({len(ids) for ids in lists}) > 40
    assert len({tuple(ids[:300]) for ids in lists[-20:]}) == 1


def test_logit_drift_is_measured_over_equal_tokens_only() -> None:
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2]) == 2
    found = drift([(-1.0, -1.5), (-2.0, -1.75)])
    assert (found.mean, found.largest, found.count) == (0.375, 0.5, 2)
    assert drift([]).count == 0


def test_every_gpu_suite_stage_names_existing_modules(tmp_path: Path) -> None:
    found = stages(["llama-1b", "llama-8b"], tmp_path, "cuda", 3)
    assert len(found) == 7
    for stage in found:
        modules = [word for word in stage.command if word.startswith("benchmarks.")]
        files = [word for word in stage.command if word.startswith("tests/")]
        assert modules or files
        assert all((ROOT / f"{word.replace('.', '/')}.py").exists() for word in modules)
        assert all((ROOT / word).exists() for word in files)


def test_a_failed_gpu_suite_stage_is_reported_with_its_last_line(tmp_path: Path) -> None:
    wrong = run(Stage("wrong", ("-c", "print('first'); raise SystemExit('the reason')")), tmp_path)
    assert (wrong.passed, wrong.last_line) == (False, "the reason")
    assert (tmp_path / "wrong.txt").read_text() == "first\nthe reason\n"
    assert summary([wrong]).row_count == 1


def test_gpu_suite_reports_are_summarized_in_one_line(tmp_path: Path) -> None:
    workloads = {
        "rows": [
            {"name": "single", "meets_bar": True},
            {"name": "batch64", "meets_bar": False},
            {"name": "start", "meets_bar": None},
        ]
    }
    kernels = [
        {"kernel": "norm", "example": "1", "us": 2.0, "reference_us": 1.0},
        {"kernel": "rope", "example": "2", "error": "wrong"},
    ]
    found = {}
    for stage in stages(["llama-1b"], tmp_path, "cuda", 1):
        if stage.report is not None:
            told_of = kernels if stage.name == "speed of kernels" else workloads
            if not stage.name.startswith("correctness"):
                stage.report.write_text(json.dumps(told_of))
            found[stage.name] = told(Outcome(stage, 0, 1.0, "last"))
    assert found == {
        "correctness, llama-1b": "last",
        "speed of kernels": "2 examples, 1 slower than PyTorch's own; failed: rope 2",
        "workloads, llama-1b": "1 of 2 bars met; missed: batch64",
    }
