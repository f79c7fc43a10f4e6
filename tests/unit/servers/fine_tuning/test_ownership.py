"""A model belongs to the tenant that trained it, and a job has the rights of its key."""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.core.key_file import add_key, remove_key
from engine.core.store.adapter_store import kept_adapters
from engine.finetuning.jobs import TrainingRequest
from engine.servers.files import store as files_store
from engine.servers.fine_tuning import routes, runner, store
from engine.servers.fine_tuning.store import MAX_OPEN_JOBS
from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.scripted_trainer import (
    LINES,
    TunedBackend,
    client_of,
    create,
    trainer_of,
    upload,
    wait_for,
)
from tests.support.servers.live_server import LiveServer, live_server, wait_until

ADMIN = "admin-key-0123456789abcdef"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys.json"
    return {
        "owner": add_key(path, "owner", tenant="team")[0],
        "colleague": add_key(path, "colleague", tenant="team")[0],
        "limited": add_key(path, "limited", tenant="team", models=[MODEL])[0],
        "stranger": add_key(path, "stranger")[0],
    }


@pytest.fixture
def backend() -> TunedBackend:
    return TunedBackend()


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], backend: TunedBackend
) -> Iterator[LiveServer]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    section = {"keys_file": tmp_path / "keys.json", "admin_key": ADMIN}
    with live_server(backend, server=section, storage={"path": tmp_path}) as server:
        yield server


def trained(server: LiveServer, key: str) -> str:
    client = client_of(server, key)
    job = create(client)
    trainer_of(job).succeed()
    return str(wait_for(client, job, "succeeded").fine_tuned_model)


def is_usable(server: LiveServer, key: str, model: str) -> bool:
    """Whether the key sees the model and may use it. It may do both or neither."""
    client = client_of(server, key)
    listed = model in [each.id for each in client.models.list()]
    try:
        client.models.retrieve(model)
        client.completions.create(model=model, prompt="a")
    except openai.NotFoundError as error:
        assert not listed and model not in error.message
        return False
    assert listed
    return True


def test_a_fine_tuned_model_is_usable_only_by_its_tenant(
    server: LiveServer, keys: dict[str, str]
) -> None:
    model = trained(server, keys["owner"])
    usable = [name for name, key in keys.items() if is_usable(server, key, model)]
    assert usable == ["owner", "colleague"]
    assert is_usable(server, ADMIN, model)


def test_only_the_owner_and_the_admin_can_delete_a_fine_tuned_model(
    server: LiveServer, keys: dict[str, str], backend: TunedBackend
) -> None:
    first, second = (trained(server, keys["owner"]) for _ in range(2))
    for name in ("stranger", "limited"):
        with pytest.raises(openai.NotFoundError) as caught:
            client_of(server, keys[name]).models.delete(first)
        assert first not in caught.value.message
    with pytest.raises(openai.PermissionDeniedError):
        client_of(server, keys["owner"]).models.delete(MODEL)
    assert client_of(server, keys["colleague"]).models.delete(first).deleted
    assert client_of(server, ADMIN).models.delete(second).deleted
    assert not is_usable(server, keys["owner"], first) and not backend.bases
    assert not kept_adapters()


def test_the_owner_of_a_fine_tuned_model_is_known_after_a_restart(
    server: LiveServer, keys: dict[str, str], backend: TunedBackend
) -> None:
    model = trained(server, keys["owner"])
    backend.reset()
    for name, path in kept_adapters().items():
        asyncio.run(backend.load_adapter(name, str(path)))
    assert is_usable(server, keys["owner"], model)
    assert not is_usable(server, keys["stranger"], model)


def test_users_cannot_delete_a_shared_adapter(
    server: LiveServer, keys: dict[str, str], backend: TunedBackend
) -> None:
    asyncio.run(backend.load_adapter("shared", "/adapters/shared"))
    with pytest.raises(openai.PermissionDeniedError, match="all clients share"):
        client_of(server, keys["owner"]).models.delete("shared")
    assert is_usable(server, keys["stranger"], "shared")


def test_a_queued_job_ends_if_its_key_was_removed(
    server: LiveServer, keys: dict[str, str], tmp_path: Path
) -> None:
    first = create(client_of(server, keys["owner"]))
    waiting = create(client_of(server, keys["owner"]))
    trainer = trainer_of(first)
    remove_key(tmp_path / "keys.json", "owner")
    answer = httpx.post(f"{server.url}/v1/admin/reload", json={}, headers={"api-key": ADMIN})
    assert answer.status_code == 200, answer.text
    trainer.succeed()
    colleague = client_of(server, keys["colleague"])
    job = wait_for(colleague, waiting, "failed")
    assert "API key that made this job was removed" in job.error.message


def test_slow_file_checks_do_not_block_other_tenants(
    server: LiveServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, stranger = (client_of(server, keys[name]) for name in ("owner", "stranger"))
    slow = upload(owner, LINES)
    may_end, num_reading = threading.Event(), 0
    make = routes.make_job

    def make_slowly(request: TrainingRequest, path: Path) -> Any:
        nonlocal num_reading
        if request.training_file.name == slow:
            num_reading += 1
            may_end.wait(30)
        return make(request, path)

    monkeypatch.setattr(routes, "make_job", make_slowly)
    with ThreadPoolExecutor(40) as pool:
        flood = [pool.submit(create, owner, training_file=slow) for _ in range(40)]
        try:
            wait_until(lambda: num_reading > 0)
            trainer_of(create(stranger)).succeed()
            assert num_reading == 1, "a tenant's files are checked one after the other"
        finally:
            may_end.set()
        made = [each.exception() is None for each in flood]
    assert sum(made) == MAX_OPEN_JOBS
    assert num_reading == MAX_OPEN_JOBS, "files of jobs that can't be made are not read"
    for job in owner.fine_tuning.jobs.list():
        owner.fine_tuning.jobs.cancel(job.id)


def test_only_the_latest_jobs_of_a_tenant_are_kept(
    server: LiveServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_KEPT_JOBS", 3)
    owner, stranger = (client_of(server, keys[name]) for name in ("owner", "stranger"))
    other = create(stranger)
    made = []
    for _ in range(6):
        made.append(create(owner).id)
        owner.fine_tuning.jobs.cancel(made[-1])
    assert [each.id for each in owner.fine_tuning.jobs.list()] == made[:1:-1]
    assert stranger.fine_tuning.jobs.retrieve(other.id).id == other.id
    with sqlite3.connect(server.services.settings.storage.directory / "batches.db") as db:
        events = db.execute("SELECT DISTINCT job_id FROM fine_tuning_events").fetchall()
    assert {each for (each,) in events} == {other.id, *made[2:]}
    trainer_of(other).succeed()
    wait_for(stranger, other, "succeeded")


def test_a_long_job_leaves_turns_to_other_tenants(
    server: LiveServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TURN_S", 0.0)
    owner, stranger = (client_of(server, keys[name]) for name in ("owner", "stranger"))
    long = create(owner)
    first = trainer_of(long)
    first.tell("metrics", 1, loss=1.0)
    wait_until(lambda: owner.fine_tuning.jobs.retrieve(long.id).trained_tokens is not None)
    monkeypatch.setattr(runner, "TURN_S", 3600.0)  # of the turns that follow
    waiting = create(owner)
    other = create(stranger)
    trainer_of(other).succeed()
    wait_for(stranger, other, "succeeded")
    assert first.asked.count("pause") == 1 and "kill" in first.asked
    trainer_of(long, 1).succeed()
    wait_for(owner, long, "succeeded")
    trainer_of(waiting).succeed()
    wait_for(owner, waiting, "succeeded")


def test_a_tenant_without_room_for_its_result_file_holds_up_no_other_tenant(
    server: LiveServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, stranger = (client_of(server, keys[name]) for name in ("owner", "stranger"))
    full, other = create(owner), create(stranger)
    with monkeypatch.context() as patched:
        patched.setattr(files_store, "MAX_FILES", 1)  # the training file is one
        trainer_of(full).succeed()
        done = wait_for(owner, full, "succeeded")
    assert not done.result_files and is_usable(server, keys["owner"], done.fine_tuned_model)
    warned = [each for each in owner.fine_tuning.jobs.list_events(full.id) if each.level == "warn"]
    assert len(warned) == 1 and "result file" in warned[0].message
    trainer_of(other).succeed()
    wait_for(stranger, other, "succeeded")


def test_the_number_of_trained_models_of_a_tenant_is_bounded(
    server: LiveServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_MODELS", 1)
    model = trained(server, keys["owner"])
    with pytest.raises(openai.APIStatusError, match="1 fine-tuned models") as caught:
        create(client_of(server, keys["colleague"]))
    assert caught.value.status_code == 507
    assert trained(server, keys["stranger"])
    assert client_of(server, keys["owner"]).models.delete(model).deleted
    assert trained(server, keys["owner"])


def test_a_filter_of_jobs_has_as_many_pairs_as_metadata_may_have(
    server: LiveServer, keys: dict[str, str]
) -> None:
    query = {f"metadata[{number}]": "a" for number in range(17)}
    headers = {"authorization": f"Bearer {keys['owner']}"}
    answer = httpx.get(f"{server.url}/v1/fine_tuning/jobs", params=query, headers=headers)
    assert answer.status_code == 400 and "16" in answer.json()["error"]["message"]
