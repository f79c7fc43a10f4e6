"""The example of fine-tuning, and the result file that it reads."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from engine.finetuning.folder import JobFolder, TrainingEvent
from engine.servers.fine_tuning.progress import step_metrics
from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.scripted_trainer import STARTED, ScriptedTrainer
from tests.support.servers.live_server import LiveServer

EXAMPLE = Path(__file__).parents[4] / "examples" / "finetune"


def run_example(server: LiveServer, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--url", f"{server.url}/v1", "--model", MODEL, *options]
    )
    spec = importlib.util.spec_from_file_location("finetune_example", EXAMPLE / "run.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "POLL_S", 0.01)
    example.main()


def test_the_fine_tuning_example_trains_and_evaluates(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The jobs train on the files of the example, which are checked as others are."""
    evaluated: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: evaluated.append(command))
    monkeypatch.setattr(ScriptedTrainer, "__init__", start_and_succeed)
    run_example(server, monkeypatch)
    run_example(server, monkeypatch, "--preferences")
    (command,) = evaluated
    assert f"{MODEL},ft:{MODEL}:facts:" in command[command.index("--models") + 1]
    told = capsys.readouterr().out
    assert told.count("succeeded after") == 2
    assert "step 1: held-back pairs: margin +0.200, 100% right" in told
    assert "Hello from a fake model." in told


def start_and_succeed(self: ScriptedTrainer, folder: JobFolder) -> None:
    self.folder, self.asked, self.status, self.pid = folder, [], None, 0
    STARTED.append(self)
    figures = {"validation_accuracy": 1.0, "validation_margin": 0.2}
    self.tell("metrics", 1, loss=0.7, accuracy=0.5, margin=0.0, **figures)
    self.succeed()


def test_a_preference_job_writes_a_result_file() -> None:
    events = [
        TrainingEvent(kind="metrics", step=1, loss=0.7, accuracy=0.5, margin=0.0),
        TrainingEvent(kind="metrics", step=1, loss=0.6, accuracy=1.0, margin=0.2),
    ]
    assert step_metrics(events).decode().splitlines() == [
        "step,train_loss,train_accuracy,valid_loss,valid_reward_accuracy,train_reward_margin,"
        "valid_reward_margin",
        "1,0.60000,1.00000,,,0.20000,",
    ]
