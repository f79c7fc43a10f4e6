"""Stored responses: conversations by id, who may see them, and how long they stay."""

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.errors import InferenceError, ResourceError
from engine.core.interfaces.backend import ChatRequest
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.responses.store import ResponseStore
from engine.servers.storage.objects import FILE_NAME
from tests.support.fakes.fake_backend import MODEL, FakeBackend, call_script
from tests.support.servers.live_server import make_settings

ANSWER = {"role": "assistant", "content": "Hello from a fake model."}


@asynccontextmanager
async def serving(
    backend: FakeBackend, path: Path, key: str | None = None, **settings: dict[str, Any]
) -> AsyncIterator[httpx.AsyncClient]:
    """A server over the storage in `path`, up to its stop."""
    storage = settings.pop("storage", {}) | {"path": path}
    server = settings.pop("server", {}) | ({"api_key": key} if key else {})
    app = create_app(make_settings(storage=storage, server=server), backend, Metrics(MODEL))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as client:
        yield client
    for component in app.state.services.components:
        await component.stop()
    assert app.state.services.lifecycle.num_admitted == 0


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(backend, tmp_path) as client:
        yield client


async def create(client: httpx.AsyncClient, input: Any, **fields: Any) -> dict[str, Any]:
    request = {"model": MODEL, "input": input} | fields
    response = await client.post("/v1/responses", json=request)
    assert response.status_code == 200, response.text
    body = response.json()
    assert isinstance(body, dict)
    return body


def messages_of(backend: FakeBackend) -> list[dict[str, Any]]:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return list(request.messages)


async def test_previous_response_id_continues_with_all_earlier_messages(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    previous: str | None = None
    before: list[dict[str, Any]] = []
    for turn in range(4):
        body = await create(client, f"turn {turn}", previous_response_id=previous)
        messages = messages_of(backend)
        assert messages == [*before, {"role": "user", "content": f"turn {turn}"}]
        assert body["previous_response_id"] == previous
        before = [*messages, ANSWER]
        previous = body["id"]


async def test_earlier_responses_live_as_long_as_the_last_of_their_conversation(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    previous: str | None = None
    for turn in range(3):
        body = await create(client, f"turn {turn}", previous_response_id=previous)
        previous = body["id"]
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        ends = [row[0] for row in database.execute("SELECT kept_until FROM responses")]
    assert len(ends) == 3 and len(set(ends)) == 1


async def test_instructions_are_not_inherited(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    first = await create(client, "a", instructions="be kind")
    await create(client, "b", previous_response_id=first["id"])
    assert [message["role"] for message in messages_of(backend)] == ["user", "assistant", "user"]
    await create(client, "b", previous_response_id=first["id"], instructions="be brief")
    assert messages_of(backend)[0] == {"role": "system", "content": "be brief"}


async def test_a_conversation_can_branch(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    first = await create(client, "a")
    for text in ("b", "c"):
        await create(client, text, previous_response_id=first["id"])
        assert [message["content"] for message in messages_of(backend)[::2]] == ["a", text]


async def test_function_calls_are_answered_in_the_next_response(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = call_script(("get", '{"a":1}'), ("get", '{"a":2}'))
    tools = [{"type": "function", "name": "get"}]
    first = await create(client, "go", tools=tools)
    results = [
        {"type": "function_call_output", "call_id": f"call_{i}", "output": str(i)} for i in (0, 1)
    ]
    await create(client, results, previous_response_id=first["id"], tools=tools)
    roles = [message["role"] for message in messages_of(backend)]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert len(messages_of(backend)[1]["tool_calls"]) == 2


async def test_a_streamed_response_is_stored_before_its_last_event(
    client: httpx.AsyncClient,
) -> None:
    request = {"model": MODEL, "input": "hi", "stream": True}
    text = (await client.post("/v1/responses", json=request)).text
    told = json.loads(text.rpartition("data: ")[2])["response"]
    assert (await client.get(f"/v1/responses/{told['id']}")).json() == told


async def test_a_response_is_read_and_deleted_and_its_successors_stay(
    client: httpx.AsyncClient,
) -> None:
    first = await create(client, "a")
    second = await create(client, "b", previous_response_id=first["id"])
    third = await create(client, "c", previous_response_id=second["id"])
    assert (await client.get(f"/v1/responses/{second['id']}")).json() == second
    deleted = await client.delete(f"/v1/responses/{second['id']}")
    assert deleted.json() == {"id": second["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        gone = await client.request(method, f"/v1/responses/{second['id']}")
        assert gone.status_code == 404
    assert (await client.get(f"/v1/responses/{third['id']}")).json() == third
    # Its other turns are there, but the conversation has a hole.
    request = {"model": MODEL, "input": "d", "previous_response_id": third["id"]}
    error = (await client.post("/v1/responses", json=request)).json()["error"]
    assert error["param"] == "previous_response_id"
    assert error["code"] == "previous_response_not_found"
    assert second["id"] in error["message"]


@pytest.mark.parametrize("previous", ["resp_none", "resp_" + "x" * 100, "'; DROP TABLE responses"])
async def test_an_unknown_previous_response_is_404(
    client: httpx.AsyncClient, previous: str
) -> None:
    request = {"model": MODEL, "input": "a", "previous_response_id": previous}
    response = await client.post("/v1/responses", json=request)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "previous_response_id"


async def test_a_conversation_survives_a_restart(backend: FakeBackend, tmp_path: Path) -> None:
    async with serving(backend, tmp_path) as client:
        first = await create(client, "a")
    async with serving(backend, tmp_path) as client:
        assert (await client.get(f"/v1/responses/{first['id']}")).json() == first
        await create(client, "b", previous_response_id=first["id"])
    assert [message["content"] for message in messages_of(backend)[::2]] == ["a", "b"]


async def test_unstored_and_failed_responses_are_not_kept(
    backend: FakeBackend, tmp_path: Path
) -> None:
    async with serving(backend, tmp_path / "unused") as client:
        body = await create(client, "a", store=False)
        assert body["store"] is False
        assert not (tmp_path / "unused").exists()
        assert (await client.get(f"/v1/responses/{body['id']}")).status_code == 404
        backend.failure, backend.fail_after = InferenceError("Not finite."), 2
        response = await client.post(
            "/v1/responses", json={"model": MODEL, "input": "a", "stream": True}
        )
        assert "response.failed" in response.text
    with sqlite3.connect(tmp_path / "unused" / "responses.db") as connection:
        assert connection.execute("SELECT count(*) FROM responses").fetchone() == (0,)


async def test_input_items_are_listed_in_pages(client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": f"m{i}"} for i in range(5)]
    body = await create(client, items)
    path = f"/v1/responses/{body['id']}/input_items"
    page = (await client.get(path)).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["m4", "m3", "m2", "m1", "m0"]
    assert (page["object"], page["has_more"]) == ("list", False)
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        query = {"limit": "2", "order": "asc"} | after
        page = (await client.get(path, params=query)).json()
        seen += [item["content"][0]["text"] for item in page["data"]]
        assert page["first_id"] == page["data"][0]["id"]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ["m0", "m1", "m2", "m3", "m4"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=٣", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_none", "after"),
        ("/input_items?before=x", "before"),
        ("?stream=true", "stream"),
        ("?stream=perhaps", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?include[]=reasoning.encrypted_content", "include.0"),
        ("/input_items?limit=1&limit=2", "limit"),
    ],
)
async def test_invalid_list_queries_are_refused(
    client: httpx.AsyncClient, path: str, param: str
) -> None:
    body = await create(client, "a")
    response = await client.get(f"/v1/responses/{body['id']}{path}")
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_include_parameters_are_accepted_for_stored_responses(
    client: httpx.AsyncClient,
) -> None:
    body = await create(client, "a")
    for name in ("include", "include[]"):
        for path in ("", "/input_items"):
            url = f"/v1/responses/{body['id']}{path}?{name}=message.output_text.logprobs"
            assert (await client.get(url)).status_code == 200


async def test_only_background_responses_can_be_cancelled(client: httpx.AsyncClient) -> None:
    body = await create(client, "a")
    response = await client.post(f"/v1/responses/{body['id']}/cancel")
    assert response.status_code == 400
    assert "background" in response.json()["error"]["message"]


async def test_item_references_resolve_to_stored_items(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    first = await create(client, [{"role": "user", "content": "a"}])
    listed = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    references = [
        {"type": "item_reference", "id": listed[0]["id"]},
        {"id": first["output"][0]["id"]},
    ]
    second = await create(client, [*references, {"role": "user", "content": "b"}])
    assert [message["content"] for message in messages_of(backend)] == ["a", ANSWER["content"], "b"]
    # What is stored is the items themselves: they outlive what they were taken from.
    await client.delete(f"/v1/responses/{first['id']}")
    await create(client, "c", previous_response_id=second["id"])
    assert [message["content"] for message in messages_of(backend)[::2]] == ["a", "b", "c"]
    response = await client.post("/v1/responses", json={"model": MODEL, "input": references})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "input[0].id"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_broken_storage_fails_only_requests_that_need_it(
    backend: FakeBackend, tmp_path: Path, streamed: bool
) -> None:
    """Only those requests fail that cannot do without it."""
    broken = tmp_path / "file"
    broken.write_text("not a directory")
    async with serving(backend, broken) as client:
        request = {"model": MODEL, "input": "a", "stream": streamed}
        for store in (None, False):
            response = await client.post("/v1/responses", json=request | {"store": store})
            assert response.status_code == 200
            assert '"store":false' in response.text.replace(" ", "")
            warned = "x-engine-warnings" in response.headers
            assert warned == (store is None)
        num_asked = len(backend.requests)
        for needed in ({"store": True}, {"previous_response_id": "resp_1"}):
            response = await client.post("/v1/responses", json=request | needed)
            assert response.status_code == 503
        assert len(backend.requests) == num_asked  # nothing was computed in vain
        assert (await client.get("/v1/responses/resp_1")).status_code == 503
    async with serving(backend, broken, server={"strict": True}) as client:
        assert (await client.post("/v1/responses", json=request)).status_code == 503


async def test_a_disk_that_fills_up_during_the_answer_fails_the_response(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*args: object) -> None:
        raise ResourceError("The disk is full.")

    monkeypatch.setattr(ResponseStore, "save", fails)
    async with serving(backend, tmp_path) as client:
        body = await create(client, "a")
        assert body["status"] == "completed"
        assert body["store"] is False
        request = {"model": MODEL, "input": "a", "store": True}
        response = await client.post("/v1/responses", json=request)
        assert response.status_code == 507
        response = await client.post("/v1/responses", json=request | {"stream": True})
        assert "event: response.failed" in response.text
        assert "event: response.completed" not in response.text
