"""Fine-tuning jobs of `engine serve` and of `engine finetune`, on tiny weights: kill -9 of the
training process and of the server, and the tuned model that is served at the end.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file

from engine.finetuning.folder import JobFolder
from engine.finetuning.plan import TrainingPlan
from engine.finetuning.trainer import Trainer
from tests.parity.tiny_models import make
from tests.support.files.tokenizer_files import byte_level_engine, write_directory
from tests.support.servers.served import ServedEngine, serve

# The training process takes seconds to start. The server's part is tested without one, in
# tests/unit/servers/fine_tuning/.
pytestmark = pytest.mark.slow

LINES = [{"prompt": f"{word} is", "completion": f" {word}"} for word in "abcdefgh"]
NUM_STEPS = 400


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, which the server calls "base"."""
    folder = write_directory(tmp_path_factory.mktemp("tuned") / "base")
    make("llama", vocab_size=byte_level_engine().get_vocab_size()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "XDG_DATA_HOME": str(tmp_path_factory.mktemp("data")),
        "LLM_ENGINE_FINETUNING__CHECKPOINT_S": "0.05",
        "LLM_ENGINE_FINETUNING__THREADS": "1",
    }


def client_of(server: ServedEngine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def last_step(client: openai.OpenAI, job_id: str) -> int:
    events = client.fine_tuning.jobs.list_events(job_id, limit=1).data
    return events[0].data.get("step", 0) if events else 0


def test_a_job_survives_kills_of_its_process_and_of_its_server(
    base: Path, env: dict[str, str], tmp_path: Path
) -> None:
    with serve(str(base), env=env) as server, client_of(server) as client:
        content = "\n".join(map(json.dumps, LINES)).encode()
        file = client.files.create(file=("train.jsonl", content), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(
            model=server.model,
            training_file=file.id,
            validation_file=file.id,
            seed=3,
            hyperparameters={"n_epochs": NUM_STEPS // 4, "batch_size": 2},
        )
        folder = JobFolder(Path(env["XDG_DATA_HOME"]) / "engine" / "fine_tuning" / job.id)
        server.wait_until(lambda: folder.last_state() is not None)
        (trainer,) = server.trainers()
        trainer.kill()
        server.wait_until(lambda: server.trainers() not in ([], [trainer]))
        before = last_step(client, job.id)
        server.wait_until(lambda: last_step(client, job.id) > before)
        (trainer,) = server.trainers()
        server.process.kill()
        psutil.wait_procs([trainer], 60)
        assert not trainer.is_running()
    with serve(str(base), env=env) as server, client_of(server) as client:
        server.wait_until(
            lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded", 120
        )
        done = client.fine_tuning.jobs.retrieve(job.id)
        events = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
        steps = [each.data["step"] for each in events if each.type == "metrics"]
        assert sorted(steps) == list(range(1, NUM_STEPS + 1))  # none is lost, none is there twice
        told = [each.message for each in events]
        assert any("was killed (SIGKILL" in each for each in told)
        assert "Training continues from the last checkpoint." in told
        assert sum("valid_loss" in each.data for each in events) == NUM_STEPS // 4
        answer = client.completions.create(
            model=done.fine_tuned_model, prompt="a is", max_tokens=1, temperature=0
        )
        assert answer.choices[0].text == " a"
    assert_equal_to_an_undisturbed_job(folder, tmp_path)


def assert_equal_to_an_undisturbed_job(folder: JobFolder, path: Path) -> None:
    plan = msgspec.structs.replace(TrainingPlan.read(folder.path), checkpoint_s=3600.0)
    plan.write(path)
    whole, num_threads = JobFolder(path), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert Trainer(whole, plan).run(lambda: False)
    finally:
        torch.set_num_threads(num_threads)
    found, wanted = (
        load_file(each.adapter / "adapter_model.safetensors") for each in (folder, whole)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def engine(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "engine.cli.main", *arguments]
    return subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=300)


def test_engine_finetune_is_paused_by_ctrl_c_and_resumed(
    base: Path, env: dict[str, str], tmp_path: Path
) -> None:
    data, out = tmp_path / "train.jsonl", tmp_path / "job"
    data.write_text("\n".join(map(json.dumps, LINES)))
    argv = [sys.executable, "-m", "engine.cli.main", "finetune", str(data), "--base", str(base)]
    options = ["--epochs", "1000", "--batch-size", "2", "--seed", "1", "--output", str(out)]
    started = subprocess.Popen([*argv, *options], env=os.environ | env, stderr=subprocess.PIPE)
    folder = JobFolder(out)
    while not any(each.kind == "metrics" for each in folder.events()[0]):
        assert started.poll() is None, started.stderr.read()
    started.send_signal(signal.SIGINT)
    _, told = started.communicate(timeout=120)
    assert started.returncode == 1 and b"--resume" in told
    plan = msgspec.structs.replace(TrainingPlan.read(out), n_epochs=0)  # it has done enough
    plan.write(out)
    done = engine(env, "finetune", "--resume", str(out))
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip()
    assert name.startswith("ft:base:tuned:")
    assert name in engine(env, "adapters", "ls").stdout
