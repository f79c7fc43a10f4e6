"""`engine finetune` and `engine eval` as a user types them: results, errors and exit statuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.cli.ops import finetune
from engine.cli.ops.finetune import loss_curve
from engine.core.store.adapter_store import records
from engine.finetuning import process
from engine.finetuning.folder import JobFolder, TrainingEvent
from engine.finetuning.plan import Hyperparameters, LoraShape, TrainingPlan, decide
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.files.lora_files import peft_folder
from tests.support.servers.live_server import live_server

LINE = {"prompt": "a is", "completion": " b"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(LINE)] * 4))
    (tmp_path / "broken.jsonl").write_text(json.dumps(LINE) + "\n{")
    (tmp_path / "base.gguf").write_bytes(b"GGUF")
    (tmp_path / "server").mkdir()
    plan = TrainingPlan(
        base="base.gguf",
        method="supervised",
        training_file="train.jsonl",
        validation_file=None,
        seed=1,
        lora=LoraShape(),
        **structs.asdict(decide(Hyperparameters(), 4)),
    )
    plan.write(tmp_path / "server")
    return tmp_path


class InstantTrainer:
    """Stands for `TrainerProcess`: two steps, and the adapter is there."""

    def __init__(self, folder: JobFolder) -> None:
        for step in (1, 2):
            valid = 0.75 if step == 2 else None
            folder.tell(
                TrainingEvent(
                    kind="metrics", step=step, num_steps=2, loss=1 / step, validation_loss=valid
                )
            )
        peft_folder(folder.adapter, {"model.layers.0.self_attn.q_proj": (8, 8)})
        folder.tell(TrainingEvent(kind="succeeded", step=2, num_steps=2))

    def exit_status(self) -> int:
        return 0

    def kill(self) -> None:
        pass


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_finetune_prints_the_name_of_the_trained_model(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "TrainerProcess", InstantTrainer)
    monkeypatch.setattr(finetune, "POLL_S", 0)
    done = run("finetune", "train.jsonl", "--base", "base.gguf", "--suffix", "own", "--rank", "8")
    assert done.exit_code == 0, done.output
    (kept,) = records()
    assert done.stdout.strip() == kept.name and kept.name.startswith("ft:base:own:")
    assert kept.base == "base"
    assert "rank 8" in done.stderr and "step 2: validation loss 0.750" in done.stderr
    assert "1.000" in done.stderr  # the curve


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "give DATA and --base MODEL, or --resume DIR"),
        (("train.jsonl",), "give DATA and --base MODEL, or --resume DIR"),
        (("absent.jsonl", "-m", "base.gguf"), "absent.jsonl can't be read: No such file"),
        (("broken.jsonl", "-m", "base.gguf"), "line 2 of the training file: this is not JSON"),
        (("train.jsonl", "-m", "absent"), "no pulled model is called 'absent'"),
        (("train.jsonl", "-m", "base.gguf", "--rank", "300"), "rank must be between 1 and 256"),
        (("train.jsonl", "-m", "base.gguf", "--method", "dpo"), "dpo needs input"),
        (
            ("train.jsonl", "-m", "base.gguf", "--validation", "broken.jsonl"),
            "line 2 of the validation file: this is not JSON",
        ),
        (("--resume", "."), "is no folder of a job"),
        (("--resume", "server"), "server is a job of a server, which continues it"),
        (("train.jsonl", "-m", "base.gguf", "--output", "server"), "there is a job in server"),
        (("train.jsonl", "-m", "base.gguf", "--suffix", "a:b"), "a suffix has 1 to 64 letters"),
    ],
)
def test_finetune_argument_errors_are_one_line(home: Path, arguments: Any, said: str) -> None:
    done = run("finetune", *arguments)
    assert done.exit_code == 2 and done.stderr.startswith("error: "), done.output
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (home / "data").exists()


def test_the_loss_curve_shows_first_and_last_losses() -> None:
    lines = loss_curve([4.0] * 30 + [1.0] * 30, rows=4, columns=6)
    assert len(lines) == 4 and lines[0].split()[0] == "4.000"
    assert [len(line) for line in lines] == [15] * 4
    assert lines[0].endswith("███   ") and lines[3].endswith("1.000 ███▁▁▁")
    assert loss_curve([], 4, 6) == []


QUESTIONS = [
    {"question": "What do you say?", "answer": "Hello from a fake model"},
    {"question": "And again?", "answer": "fake", "check": "contains"},
    {"question": "And then?", "answer": "nothing"},
]


def test_eval_of_a_server_prints_a_table_or_json(home: Path) -> None:
    (home / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    with live_server(FakeBackend()) as server:
        model = server.backend.models()[0].id
        given = ["eval", "questions.jsonl", "--url", f"{server.url}/v1", "--models", model]
        told = run(*given, "--json")
        assert told.exit_code == 0, told.output
        (found,) = json.loads(told.stdout)["models"]
        assert (found["right"], found["answered"]) == (2, 3)
        shown = run(*given)
        assert model in shown.stdout and "66.7" in shown.stdout
        assert "And then?" in shown.stdout and "nothing" in shown.stdout  # a wrong answer
        kept = ("--output", "kept.jsonl")
        assert run(*given, *kept).exit_code == 0
        other = run(*given, *kept, "--judge", model)  # its verdicts would be those of another
        assert other.exit_code == 2 and "has results of another run" in other.output
        bad = run(*given[:-1], "absent-model")
        assert bad.exit_code == 2 and "absent-model" in bad.output
