"""A live server with a scripted training process, for all tests of this folder."""

from collections.abc import Iterator

import openai
import pytest

from engine.servers.fine_tuning import hold, routes, runner
from tests.support.fakes.scripted_trainer import STARTED, ScriptedTrainer, TunedBackend, client_of
from tests.support.servers.live_server import LiveServer, live_server, wait_until


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runner, "TrainerProcess", ScriptedTrainer)
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(runner, "REST_S", 0.05)
    monkeypatch.setattr(runner, "FAULT_S", 0.05)
    monkeypatch.setattr(routes, "STREAM_POLL_S", 0.01)
    monkeypatch.setattr(hold, "POLL_S", 0.01)
    monkeypatch.setattr(hold, "QUIET_S", 0.05)
    STARTED.clear()
    yield
    for trainer in STARTED:
        assert trainer.asked.count("kill") == 1, "a training process was left"


@pytest.fixture(scope="session")
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
