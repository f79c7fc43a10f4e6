"""Recorded requests run again with the same tokens, and a difference is found."""

import os
import random
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from engine.cli.commands import app as cli
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.http.recorder import RecordedFile, Recorder
from engine.servers.ops.replay import first_difference
from tests.support.servers.live_server import live_server, make_settings
from tests.support.toy_engine.llm import ToyBackend


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    backend = ToyBackend()
    await backend.start()
    settings = make_settings(
        requests={"record": True, "max_recorded": 30}, storage={"path": tmp_path}
    )
    app = create_app(settings, backend, Metrics("toy"))
    recorder = app.state.services.history.recorder
    assert isinstance(recorder, Recorder)
    await recorder.start()
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
        made.recorder = recorder  # type: ignore[attr-defined]
        yield made
    await recorder.stop()
    await backend.stop()


async def answered(client: httpx.AsyncClient, **fields: Any) -> str:
    body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 8, "parse_special": False}
    reply = await client.post("/v1/completions", json=body | fields)
    assert reply.status_code == 200, reply.text
    await client.recorder.stop()  # type: ignore[attr-defined]  # its files are written
    return str(reply.json()["id"])


async def replayed(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    reply = await client.post(f"/v1/admin/requests/{request_id}/replay", json={})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_recorded_requests_give_the_same_tokens(client: httpx.AsyncClient) -> None:
    rng = random.Random(1)
    for number in range(12):
        fields: dict[str, Any] = {"prompt": [rng.randrange(20) for _ in range(1 + number)]}
        fields |= {"temperature": rng.choice([0, 1.0, 1.5]), "n": rng.choice([1, 3])}
        if number % 3 == 0:
            fields["seed"] = number
        if number % 4 == 0:
            fields["stop"] = ["c"]
        found = await replayed(client, await answered(client, **fields))
        assert found["same"] and found["same_fingerprint"], found
        assert len(found["choices"]) == fields["n"]


async def test_replay_finds_a_changed_token(client: httpx.AsyncClient, tmp_path: Path) -> None:
    request_id = await answered(client, ignore_eos=True)
    (path,) = (tmp_path / "recorded").iterdir()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    recorded = msgspec.msgpack.decode(path.read_bytes(), type=RecordedFile)
    recorded.requests[0].token_ids[0][5] ^= 1
    recorded.requests[0].fingerprint = "another"
    path.write_bytes(msgspec.msgpack.encode(recorded))
    found = await replayed(client, request_id)
    assert found["choices"] == [{"choice": 0, "tokens": 8, "differs_at": 5}]
    assert (found["same"], found["same_fingerprint"]) == (False, False)
    path.write_bytes(b"junk")
    reply = await client.post(f"/v1/admin/requests/{request_id}/replay", json={})
    assert reply.status_code == 404


async def test_old_recordings_are_deleted(client: httpx.AsyncClient, tmp_path: Path) -> None:
    first = await answered(client)
    client.recorder._max_files = 3  # type: ignore[attr-defined]
    for _ in range(3):
        last = await answered(client)
    assert len(list((tmp_path / "recorded").iterdir())) == 3
    reply = await client.post(f"/v1/admin/requests/{first}/replay", json={})
    assert reply.status_code == 404
    assert (await replayed(client, last))["same"]


def test_without_recording_replay_names_the_setting() -> None:
    with live_server() as server:
        done = CliRunner().invoke(cli, ["replay", "chatcmpl-1", "--url", server.url])
    assert done.exit_code != 0
    assert "requests.record = true" in done.output
    assert done.output.strip().count("\n") == 0


def test_first_difference_of_two_token_lists() -> None:
    assert first_difference([1, 2], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
