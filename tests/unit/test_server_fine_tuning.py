"""/v1/fine_tuning/jobs as the official client uses it. The training process is scripted."""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from engine.core.errors import InvalidRequestError
from engine.finetuning.folder import JobFolder, TrainingEvent
from engine.servers.fine_tuning import hold, routes, runner
from engine.servers.fine_tuning.progress import step_metrics
from tests.fake_backend import CARD, MODEL, FakeBackend
from tests.live_server import LiveServer, chat, events_of, live_server, wait_until
from tests.lora_files import peft_folder

HTTP = httpx.Client(timeout=60)  # one for all: a client is slow to make
LINES = [{"prompt": f"{word} is", "completion": f" {word}"} for word in "abcdefgh"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune"
SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}


class ScriptedTrainer:
    """Stands for `TrainerProcess`: does what the test says, and notes what is asked of it."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.status: int | None = None
        self.pid = 0
        STARTED.append(self)

    def exit_status(self) -> int | None:
        return self.status

    def hold(self) -> None:
        self.asked.append("hold")

    def go_on(self) -> None:
        self.asked.append("go_on")

    def pause(self) -> None:
        self.asked.append("pause")
        self.tell("paused")
        self.status = 0

    def kill(self) -> None:
        self.asked.append("kill")

    def tell(self, kind: Any, step: int = 1, **figures: Any) -> None:
        self.folder.tell(TrainingEvent(kind=kind, step=step, num_steps=4, **figures))

    def succeed(self) -> None:
        peft_folder(self.folder.adapter, SHAPES)
        self.tell("succeeded", 4)
        self.status = 0


STARTED: list[ScriptedTrainer] = []


class TunedBackend(FakeBackend):
    """Serves adapters, in so far as it notes them."""

    def reset(self, *words: Any) -> None:
        super().reset(*words)
        self.bases: dict[str, str | None] = {}
        self.refuses_adapters = False

    def files_of(self, model: str) -> Path | None:
        return Path("/models/base") if model == MODEL else None

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        if self.refuses_adapters:
            raise InvalidRequestError("no adapters here")
        self.bases[name] = base
        self.cards = [*self.cards, msgspec.structs.replace(CARD, id=name, root=MODEL, parent=MODEL)]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runner, "TrainerProcess", ScriptedTrainer)
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(runner, "REST_S", 0.05)
    monkeypatch.setattr(routes, "STREAM_POLL_S", 0.01)
    monkeypatch.setattr(hold, "POLL_S", 0.01)
    monkeypatch.setattr(hold, "QUIET_S", 0.05)
    STARTED.clear()
    yield
    for trainer in STARTED:
        assert trainer.asked.count("kill") == 1, "a training process was left"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    storage = tmp_path_factory.mktemp("storage")
    with live_server(TunedBackend(), storage={"path": storage}) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    shared.backend.reset()
    yield shared
    client = client_of(shared)
    for job in client.fine_tuning.jobs.list():
        if job.status in ("queued", "running", "paused"):
            client.fine_tuning.jobs.cancel(job.id)
    wait_until(lambda: all("kill" in trainer.asked for trainer in STARTED))


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return client_of(server)


def client_of(server: LiveServer) -> openai.OpenAI:
    base = f"{server.url}/v1"
    return openai.OpenAI(base_url=base, api_key="unused", max_retries=0, http_client=HTTP)


def upload(client: openai.OpenAI, lines: list[Any], name: str = "train.jsonl") -> str:
    content = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return client.files.create(file=(name, content.encode()), purpose="fine-tune").id


def create(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "training_file": None} | fields
    given["training_file"] = given["training_file"] or upload(client, LINES)
    return client.fine_tuning.jobs.create(**given)


def trainer_of(job: Any, number: int = 0) -> ScriptedTrainer:
    def own() -> list[ScriptedTrainer]:
        return [each for each in STARTED if each.folder.path.name == job.id]

    wait_until(lambda: len(own()) > number)
    return own()[number]


def wait_for(client: openai.OpenAI, job: Any, status: str) -> Any:
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == status)
    return client.fine_tuning.jobs.retrieve(job.id)


def metric(server: LiveServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    (row,) = [each for each in text.splitlines() if each.startswith(f"engine_finetuning_{name} ")]
    return float(row.rpartition(" ")[2])


def test_a_job_from_its_files_to_its_model(client: openai.OpenAI, server: LiveServer) -> None:
    checked = upload(client, LINES[:2], "check.jsonl")
    job = create(client, validation_file=checked, suffix="own", seed=5, metadata={"for": "us"})
    assert (job.object, job.seed, job.metadata) == ("fine_tuning.job", 5, {"for": "us"})
    assert job.method.supervised.hyperparameters.n_epochs == 30
    assert (job.hyperparameters.batch_size, job.hyperparameters.learning_rate_multiplier) == (1, 1)
    trainer = trainer_of(job)
    trainer.tell("loading", 0)
    trainer.tell("metrics", 1, loss=2.0, accuracy=0.25, trained_tokens=10, tokens_per_s=7.0)
    trainer.tell(
        "metrics",
        2,
        loss=1.0,
        accuracy=0.5,
        validation_loss=1.5,
        validation_accuracy=0.4,
        trained_tokens=20,
        tokens_per_s=8.0,
    )
    draft = trainer.folder.new_checkpoint(2, ends_epoch=True)
    peft_folder(draft, SHAPES)
    (draft / "optimizer.safetensors").write_bytes(b"moments")
    kept = trainer.folder.keep_checkpoint(draft)
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).trained_tokens == 20)
    assert [metric(server, name) for name in ("step", "steps", "loss")] == [2, 4, 1.0]
    assert (metric(server, "validation_loss"), metric(server, "tokens_per_second")) == (1.5, 8.0)
    assert metric(server, 'jobs{status="running"}') == 1

    trainer.succeed()
    done = wait_for(client, job, "succeeded")
    name = f"ft:{MODEL}:own:{job.id.removeprefix('ftjob-')[:8]}"
    assert done.fine_tuned_model == name and done.finished_at >= done.created_at
    assert server.backend.bases == {name: MODEL, f"{name}:ckpt-step-2": MODEL}
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert checkpoint.fine_tuned_model_checkpoint == f"{name}:ckpt-step-2"
    assert (checkpoint.metrics.full_valid_loss, checkpoint.metrics.train_loss) == (1.5, 1.0)
    (result,) = done.result_files
    assert client.files.retrieve(result).purpose == "fine-tune-results"
    assert client.files.content(result).text == (
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n"
        "1,2.00000,0.25000,,\n"
        "2,1.00000,0.50000,1.50000,0.40000\n"
    )
    wait_until(lambda: not (kept / "optimizer.safetensors").exists())
    assert metric(server, 'jobs{status="succeeded"}') >= 1

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))  # several pages
    assert [each.type for each in events].count("metrics") == 2
    assert events[-1].message.startswith("Created") and "success" in events[0].message
    assert [each.data for each in events if each.type == "metrics"][0] == {
        "step": 2,
        "total_steps": 4,
        "train_loss": 1.0,
        "train_mean_token_accuracy": 0.5,
        "valid_loss": 1.5,
        "valid_mean_token_accuracy": 0.4,
    }
    assert client.fine_tuning.jobs.list(limit=1).data[0].id == job.id


def test_events_are_streamed_until_the_job_ends(client: openai.OpenAI, server: LiveServer) -> None:
    job = create(client)
    trainer = trainer_of(job)
    found: list[Any] = []

    def read() -> None:
        url = f"{server.url}/v1/fine_tuning/jobs/{job.id}/events?stream=true"
        found.extend(events_of(httpx.get(url, timeout=60).text))

    reader = threading.Thread(target=read)
    reader.start()
    trainer.tell("metrics", 1, loss=2.0)
    trainer.succeed()
    reader.join(60)
    assert found[-1] == "[DONE]"
    assert [each["data"]["step"] for each in found[:-1] if each["type"] == "metrics"] == [1]


def test_jobs_wait_for_each_other_and_stop_when_told(client: openai.OpenAI) -> None:
    first, second = create(client), create(client)
    trainer = trainer_of(first)
    assert client.fine_tuning.jobs.retrieve(second.id).status == "queued"
    assert client.fine_tuning.jobs.pause(first.id).status == "paused"
    wait_until(lambda: "kill" in trainer.asked)
    other = trainer_of(second)
    assert client.fine_tuning.jobs.resume(first.id).status == "queued"
    (other.folder.path / "large").write_bytes(b"x")
    assert client.fine_tuning.jobs.cancel(second.id).status == "cancelled"
    wait_until(lambda: "kill" in other.asked and not other.folder.path.exists())
    again = trainer_of(first, 1)
    with pytest.raises(openai.ConflictError, match="cancelled can't become paused"):
        client.fine_tuning.jobs.pause(second.id)
    with pytest.raises(openai.ConflictError, match="reads this file"):
        client.files.delete(first.training_file)
    client.files.delete(second.training_file)
    client.fine_tuning.jobs.pause(first.id)
    wait_until(lambda: "kill" in again.asked)
    client.fine_tuning.jobs.cancel(first.id)  # paused: no process has its folder
    wait_until(lambda: not again.folder.path.exists())


def test_training_is_held_while_requests_are_open(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "SLICE_EVERY_S", 0.1)
    monkeypatch.setattr(hold, "SLICE_S", 0.01)
    job = create(client)
    trainer = trainer_of(job)
    server.backend.reset(["word "] * 1000)
    server.backend.token_s = 0.02
    with HTTP.stream("POST", f"{server.url}/v1/chat/completions", json=chat(stream=True)) as answer:
        lines = answer.iter_lines()  # without this name, the connection would be closed
        next(lines)
        wait_until(lambda: trainer.asked[:1] == ["hold"])
        assert metric(server, "held") in (0, 1)
        wait_until(lambda: trainer.asked[:3] == ["hold", "go_on", "hold"])  # a slice
    wait_until(lambda: trainer.asked[-1] == "go_on" and metric(server, "held") == 0)


def test_a_dead_trainer_is_replaced_until_it_makes_no_progress(client: openai.OpenAI) -> None:
    job = create(client)
    for number, step in enumerate((1, 2, 2, 1)):  # steps after a checkpoint are repeated
        trainer = trainer_of(job, number)
        trainer.tell("metrics", step, loss=2.0)
        (trainer.folder.path / "trainer.log").write_text("Killed by a test\n")
        trainer.status = -9
    failed = wait_for(client, job, "failed")
    assert failed.error.message == "the training process died 3 times: Killed by a test"
    levels = [each.level for each in client.fine_tuning.jobs.list_events(job.id)]
    assert levels.count("warn") == runner.MAX_DEATHS and levels.count("error") == 1
    assert len(STARTED) == 4


def test_a_failure_of_the_trainer_is_the_jobs_error(client: openai.OpenAI) -> None:
    job = create(client)
    trainer = trainer_of(job)
    trainer.tell("failed", message="the loss of step 1 is not finite")
    trainer.status = 1
    assert wait_for(client, job, "failed").error.message == "the loss of step 1 is not finite"


def test_an_adapter_that_is_not_served_is_kept(client: openai.OpenAI, server: LiveServer) -> None:
    server.backend.refuses_adapters = True
    job = create(client)
    trainer_of(job).succeed()
    assert wait_for(client, job, "succeeded").fine_tuned_model
    told = [each.message for each in client.fine_tuning.jobs.list_events(job.id)]
    assert any("not served: no adapters here" in each for each in told)


def test_a_job_continues_after_the_server_was_killed(tmp_path: Path) -> None:
    with live_server(TunedBackend(), storage={"path": tmp_path}) as server:
        client = client_of(server)
        job, cancelled = create(client), create(client)
        trainer_of(job).tell("metrics", 1, loss=2.0)
        wait_until(lambda: len(client.fine_tuning.jobs.list_events(job.id).data) == 3)
        client.fine_tuning.jobs.cancel(cancelled.id)
    (tmp_path / "fine_tuning" / cancelled.id).mkdir(exist_ok=True)  # as if killed before
    with live_server(TunedBackend(), storage={"path": tmp_path}) as server:
        client = client_of(server)
        trainer = trainer_of(job, 1)
        assert not (tmp_path / "fine_tuning" / cancelled.id).exists()
        trainer.tell("metrics", 1, loss=2.0)  # repeated after the checkpoint
        trainer.tell("metrics", 2, loss=1.0)
        trainer.succeed()
        wait_for(client, job, "succeeded")
        events = client.fine_tuning.jobs.list_events(job.id).data
        assert [each.data["step"] for each in events if each.type == "metrics"] == [2, 1]
        assert "Training continues from the last checkpoint." in [each.message for each in events]


PAIR = {
    "input": {"messages": [{"role": "user", "content": "Hi"}]},
    "preferred_output": [{"role": "assistant", "content": "Hello."}],
    "non_preferred_output": [{"role": "assistant", "content": "What?"}],
}


@pytest.mark.parametrize(
    "lines, fields, param, said",
    [
        (
            [LINES[0], '{"prompt": '],
            {},
            "training_file",
            "line 2 of the training file: this is not JSON",
        ),
        ([PAIR], {}, "training_file", "line 1 of the training file: this is a preference"),
        (LINES, {"method": {"type": "dpo"}}, "training_file", "dpo needs input"),
        (["", ""], {}, "training_file", "the training file has no examples"),
        (LINES, {"model": "absent"}, "model", "'absent' can't be fine-tuned here"),
        (LINES, {"extra_body": {"lora": {"rank": 257}}}, "lora.rank", "256"),
        (LINES, {"extra_body": {"lora": {"rnk": 1}}}, "lora.rnk", ""),
        (LINES, {"training_file": "file-0"}, "training_file", "There is no such file"),
        (LINES, {"suffix": "a b"}, "suffix", "pattern"),
        (LINES, {"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", ""),
        (LINES, {"method": {"type": "reinforcement"}}, "method.type", "supervised"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    client: openai.OpenAI, server: LiveServer, lines: Any, fields: Any, param: str, said: str
) -> None:
    given = {"training_file": upload(client, lines)} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **given)
    assert str(caught.value.param).startswith(param), caught.value
    message = caught.value.body["message"]
    assert said in message and "\n" not in message and "Traceback" not in message, message
    assert not STARTED and HTTP.get(f"{server.url}/health").status_code == 200


def test_jobs_beyond_the_limit_leave_no_folder(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.servers.fine_tuning import store

    monkeypatch.setattr(store, "MAX_OPEN_JOBS", 0)
    folders = server.services.settings.storage.directory / "fine_tuning"
    before = list(folders.glob("*"))
    with pytest.raises(openai.RateLimitError):
        create(client)
    assert list(folders.glob("*")) == before


def run_example(server: LiveServer, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--url", f"{server.url}/v1", "--model", MODEL, *options]
    )
    spec = importlib.util.spec_from_file_location("finetune_example", EXAMPLE / "run.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "POLL_S", 0.01)
    example.main()


def test_the_example_trains_facts_and_preferences(
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


def test_the_result_file_of_a_preference_job() -> None:
    events = [
        TrainingEvent(kind="metrics", step=1, loss=0.7, accuracy=0.5, margin=0.0),
        TrainingEvent(kind="metrics", step=1, loss=0.6, accuracy=1.0, margin=0.2),
    ]
    assert step_metrics(events).decode().splitlines() == [
        "step,train_loss,train_accuracy,valid_loss,valid_reward_accuracy,train_reward_margin,"
        "valid_reward_margin",
        "1,0.60000,1.00000,,,0.20000,",
    ]
