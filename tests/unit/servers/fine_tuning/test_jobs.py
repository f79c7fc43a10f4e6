"""/v1/fine_tuning/jobs as the official client uses it: from files to a model, the queue, kills."""

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.core.errors import UnavailableError
from engine.core.key_file import add_key
from engine.servers.fine_tuning import hold, runner, store
from engine.servers.serving import followers
from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.scripted_trainer import (
    HTTP,
    LINES,
    SHAPES,
    STARTED,
    TunedBackend,
    client_of,
    create,
    metric,
    trainer_of,
    upload,
    wait_for,
)
from tests.support.files.lora_files import peft_folder
from tests.support.servers.live_server import LiveServer, chat, events_of, live_server, wait_until


def test_a_fine_tuning_job_runs_from_files_to_a_served_model(
    client: openai.OpenAI, server: LiveServer
) -> None:
    validation = upload(client, LINES[:2], "check.jsonl")
    job = create(client, validation_file=validation, suffix="own", seed=5, metadata={"for": "us"})
    assert (job.object, job.seed, job.metadata) == ("fine_tuning.job", 5, {"for": "us"})
    assert job.method.supervised.hyperparameters.n_epochs == 30
    assert (job.hyperparameters.batch_size, job.hyperparameters.learning_rate_multiplier) == (1, 1)
    trainer = trainer_of(job)
    trainer.tell("loading", 0)
    trainer.tell("metrics", 1, loss=2.0, accuracy=0.25, trained_tokens=10, tokens_per_s=7.0)
    checked = {"validation_loss": 1.5, "validation_accuracy": 0.4, "tokens_per_s": 8.0}
    trainer.tell("metrics", 2, loss=1.0, accuracy=0.5, trained_tokens=20, **checked)
    draft = trainer.folder.new_checkpoint(2, ends_epoch=True)
    peft_folder(draft, SHAPES)
    (draft / "optimizer.safetensors").write_bytes(b"moments")
    kept = trainer.folder.keep_checkpoint(draft)
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).trained_tokens == 20)
    assert client.fine_tuning.jobs.retrieve(job.id).estimated_finish >= job.created_at
    assert [metric(server, name) for name in ("step", "steps", "loss")] == [2, 4, 1.0]
    assert (metric(server, "validation_loss"), metric(server, "tokens_per_second")) == (1.5, 8.0)
    assert metric(server, 'jobs{status="running"}') == 1

    trainer.succeed()
    done = wait_for(client, job, "succeeded")
    name = f"ft:{MODEL}:own:{job.id.removeprefix('ftjob-')[:8]}"
    assert done.fine_tuned_model == name and done.finished_at >= done.created_at
    assert done.estimated_finish is None
    assert server.backend.bases == {name: MODEL, f"{name}:ckpt-step-2": MODEL}
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert checkpoint.fine_tuned_model_checkpoint == f"{name}:ckpt-step-2"
    assert (checkpoint.metrics.full_valid_loss, checkpoint.metrics.train_loss) == (1.5, 1.0)
    assert not client.fine_tuning.jobs.checkpoints.list(job.id, after=checkpoint.id).data
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
    for wanted, found in (({"for": "us"}, [job.id]), ({"for": "us", "by": "me"}, [])):
        assert [each.id for each in client.fine_tuning.jobs.list(metadata=wanted)] == found


def test_a_bug_between_two_jobs_does_not_end_the_queue(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FAULT_S", 0.05)
    next_job, faults = store.JobStore.next_job, [ValueError("a bug"), OSError("a disk")]

    async def fail_first(self: store.JobStore, turns: dict[str, int]) -> Any:
        if faults:
            raise faults.pop()
        return await next_job(self, turns)

    monkeypatch.setattr(store.JobStore, "next_job", fail_first)
    job = create(client)
    trainer_of(job).succeed()
    wait_for(client, job, "succeeded")
    assert not faults


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


def test_a_tenant_follows_a_bounded_number_of_jobs(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "MAX_FOLLOWERS", 1)
    job = create(client)
    trainer_of(job)
    url = f"{server.url}/v1/fine_tuning/jobs/{job.id}/events?stream=true"

    def status() -> int:
        with httpx.stream("GET", url, timeout=60) as stream:
            return stream.status_code

    with httpx.stream("GET", url, timeout=60) as stream:
        events = stream.iter_bytes()  # httpx closes a stream whose iterator is gone
        assert next(events)
        assert status() == 429
    wait_until(lambda: status() == 200)


def test_jobs_run_one_at_a_time_and_can_be_paused_resumed_and_cancelled(
    client: openai.OpenAI,
) -> None:
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


def test_a_job_resumed_at_once_keeps_running(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = create(client)
    trainer_of(job)
    wait_for(client, job, "running")
    with monkeypatch.context() as patch:
        patch.setattr(runner.JobRunner, "wake", lambda self: None)
        patch.setattr(runner, "POLL_S", 0.5)  # the runner mostly sees neither of the changes
        client.fine_tuning.jobs.pause(job.id)
        client.fine_tuning.jobs.resume(job.id)
    wait_for(client, job, "running")
    STARTED[-1].succeed()
    wait_for(client, job, "succeeded")


def test_training_is_paused_while_requests_are_open(
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


def test_a_dead_trainer_is_restarted_as_long_as_it_makes_progress(client: openai.OpenAI) -> None:
    job = create(client)
    for number, step in enumerate((1, 2, 2, 1)):  # steps after a checkpoint are repeated
        trainer = trainer_of(job, number)
        trainer.tell("metrics", step, loss=2.0)
        (trainer.folder.path / "trainer.log").write_text("Killed by a test\n")
        trainer.status = -9
    failed = wait_for(client, job, "failed")
    assert failed.error.message == (
        "The training process was killed (SIGKILL, as happens when memory runs out)."
        " It died 3 times. Killed by a test"
    )
    levels = [each.level for each in client.fine_tuning.jobs.list_events(job.id)]
    assert levels.count("warn") == runner.MAX_DEATHS and levels.count("error") == 1
    assert len(STARTED) == 4


def test_warnings_of_the_trainer_become_events(client: openai.OpenAI) -> None:
    job = create(client)
    trainer = trainer_of(job)
    trainer.tell("notice", message="3 examples were cut.")
    trainer.succeed()
    wait_for(client, job, "succeeded")
    (warned,) = [e for e in client.fine_tuning.jobs.list_events(job.id) if e.level == "warn"]
    assert (warned.message, warned.type) == ("3 examples were cut.", "message")


def test_a_job_waits_while_the_storage_fails(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, is_full = create(client), True
    trainer, note = trainer_of(job), store.JobStore.note

    async def fail(self: store.JobStore, *given: Any, **named: Any) -> None:
        if is_full:
            raise UnavailableError("The server's storage failed; its log says why.")
        await note(self, *given, **named)

    monkeypatch.setattr(store.JobStore, "note", fail)
    trainer.tell("metrics", 1, loss=2.0)
    wait_until(lambda: "kill" in trainer.asked)
    is_full = False
    trainer_of(job, 1).succeed()
    assert wait_for(client, job, "succeeded").error is None
    steps = [each.data.get("step") for each in client.fine_tuning.jobs.list_events(job.id)]
    assert 1 in steps  # the step that could not be recorded


def test_an_error_of_the_trainer_is_the_jobs_error(client: openai.OpenAI) -> None:
    job = create(client)
    trainer = trainer_of(job)
    trainer.tell("failed", message="the loss of step 1 is not finite")
    trainer.status = 1
    assert wait_for(client, job, "failed").error.message == "the loss of step 1 is not finite"


def test_an_adapter_that_cannot_be_served_is_kept(
    client: openai.OpenAI, server: LiveServer
) -> None:
    server.backend.refuses_adapters = True
    job = create(client)
    trainer_of(job).succeed()
    assert wait_for(client, job, "succeeded").fine_tuned_model
    told = [each.message for each in client.fine_tuning.jobs.list_events(job.id)]
    assert any("not served: no adapters here" in each for each in told)
    assert not any(str(server.services.settings.storage.directory) in each for each in told)


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


def test_an_adapter_not_exported_by_a_killed_server_is_served_later(tmp_path: Path) -> None:
    with live_server(TunedBackend(), storage={"path": tmp_path}) as server:
        job = create(client_of(server))
        trainer = trainer_of(job)
    trainer.tell("metrics", 4, loss=0.5, trained_tokens=40)
    trainer.succeed()
    with live_server(TunedBackend(), storage={"path": tmp_path}) as server:
        client = client_of(server)
        done = wait_for(client, job, "succeeded")
        assert done.fine_tuned_model in server.backend.bases and done.trained_tokens == 40
        assert [trainer] == STARTED, "it was trained again"


def test_a_key_can_fine_tune_only_models_it_may_use(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    limited, _ = add_key(keys, "limited", models=["other"])
    free, _ = add_key(keys, "free")
    sections = {"storage": {"path": tmp_path}, "performance": {"max_adapter_rank": 8}}
    with live_server(TunedBackend(), server={"keys_file": keys}, **sections) as server:
        with pytest.raises(openai.BadRequestError, match="can't be fine-tuned here"):
            create(client_of(server, limited))
        client = client_of(server, free)
        with pytest.raises(openai.BadRequestError, match="above 8, which is the highest"):
            create(client)
        job = create(client, extra_body={"lora": {"rank": 8}})
        with pytest.raises(openai.NotFoundError):
            client_of(server, limited).fine_tuning.jobs.retrieve(job.id)
        client.fine_tuning.jobs.cancel(job.id)
