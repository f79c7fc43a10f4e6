"""`/v1/admin/requests`: who sees which requests, and what a real engine tells about them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.interfaces.request import RequestNotes, TokenDelta
from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.frontend.request_recovery import MAX_LEFT, OpenRequests
from engine.servers.app import create_app
from engine.servers.http.request_log import RequestHistory, RequestRecord
from engine.servers.serving.admission import Ticket
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.fakes.routed_replicas import replica, router
from tests.support.servers.live_server import (
    chat,
    events_of,
    live_server,
    make_settings,
    wait_until,
)
from tests.support.toy_engine.llm import ToyBackend
from tests.unit.servers.ops.test_explain import QUICK

ADMIN = "admin-key-0123456789abcdef"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_tenant_sees_its_own_requests_and_the_admin_all(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.json"
    ours, _ = add_key(keys_file, "ours")
    theirs, _ = add_key(keys_file, "theirs")
    server = {"keys_file": keys_file, "admin_key": ADMIN}
    with live_server(server=server, requests={"keep": 3}) as live:
        url = f"{live.url}/v1/admin/requests"
        post = f"{live.url}/v1/chat/completions"
        ids = [
            httpx.post(post, json=chat(), headers=bearer(key)).json()["id"]
            for key in (ours, ours, theirs, theirs)
        ]

        def seen(key: str) -> list[str]:
            return [each["id"] for each in httpx.get(url, headers=bearer(key)).json()["requests"]]

        assert seen(ours) == [ids[1]]  # one more was kept, and is too old
        assert seen(theirs) == [ids[3], ids[2]]
        assert seen(ADMIN) == [ids[3], ids[2], ids[1]]
        assert httpx.get(f"{url}/{ids[1]}", headers=bearer(ours)).status_code == 200
        assert httpx.get(f"{url}/{ids[1]}", headers=bearer(ADMIN)).status_code == 200
        hidden = httpx.get(f"{url}/{ids[1]}", headers=bearer(theirs))
        assert hidden.status_code == 404
        assert "last 3" in hidden.json()["error"]["message"]
        assert httpx.get(url).status_code == 401
        assert httpx.get(f"{url}?limit=0", headers=bearer(ours)).status_code == 400


def test_a_flood_does_not_evict_explanations_of_other_tenants(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.json"
    ours, theirs = (add_key(keys_file, name)[0] for name in ("ours", "theirs"))
    with live_server(server={"keys_file": keys_file}, requests={"keep": 4}) as live:

        def ask(key: str) -> str:
            url = f"{live.url}/v1/chat/completions"
            return str(httpx.post(url, json=chat(), headers=bearer(key)).json()["id"])

        first = ask(ours)
        flood = [ask(theirs) for _ in range(9)]
        url = f"{live.url}/v1/admin/requests"
        assert httpx.get(f"{url}/{first}", headers=bearer(ours)).status_code == 200
        kept = httpx.get(url, headers=bearer(theirs)).json()["requests"]
        assert [each["id"] for each in kept] == flood[:-4:-1]


@pytest.mark.parametrize("admin_key", [None, ADMIN])
def test_routing_decisions_are_shown_only_to_keys_that_may_read_routes(
    admin_key: str | None,
) -> None:
    key = "client-key-0123456789abcdef"
    server = {"api_key": key, "admin_key": admin_key}
    with live_server(router(replica("a")), server=server) as live:
        sent = chat() | {"model": "m"}
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=sent, headers=bearer(key))
        request_id = answer.json()["id"]

        def told(path: str, reader: str) -> httpx.Response:
            return httpx.get(f"{live.url}/v1/admin/{path}/{request_id}", headers=bearer(reader))

        may_read = told("routes", key).status_code == 200
        assert may_read == (admin_key is None)
        assert bool(told("requests", key).json()["decisions"]) == may_read
        if admin_key is not None:
            assert told("requests", admin_key).json()["decisions"][0]["chosen"] == "a"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    backend = ToyBackend()
    await backend.start()
    app = create_app(make_settings(), backend, Metrics("toy"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as made:
        yield made
    await backend.stop()


async def explained(client: httpx.AsyncClient) -> dict[str, Any]:
    body = {
        "model": "toy",
        "prompt": [1, 2, 3, 4, 5, 6],
        "max_tokens": 5,
        "n": 2,
        "parse_special": False,
        "ignore_eos": True,
    }
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = await client.get(f"/v1/admin/requests/{answer.json()['id']}")
    assert found.status_code == 200, found.text
    explanation: dict[str, Any] = found.json()
    return explanation


async def test_the_explanation_contains_the_engines_timeline(client: httpx.AsyncClient) -> None:
    told = await explained(client)
    assert [each["finish_reason"] for each in told["choices"]] == ["length", "length"]
    assert {each["generated_tokens"] for each in told["choices"]} == {5}
    assert sum(chunk["tokens"] for chunk in told["choices"][0]["prefill"]) == 6
    assert told["cache"]["prompt_tokens"] == 6
    assert "prompt_goes_on" not in told["cache"]  # no text, unless requests.show_text is set
    names = [each["name"] for each in told["spans"]]
    assert names.index("queue") < names.index("prefill") < names.index("decode")
    ends = [each["end_s"] for each in told["spans"]]
    assert ends == sorted(ends)
    assert told["cause"] and told["explanation"]


async def test_a_stop_string_does_not_hide_the_timeline(client: httpx.AsyncClient) -> None:
    body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0}
    body |= {"parse_special": False, "ignore_eos": True}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    cut = (await client.post("/v1/completions", json=body | {"stop": whole[3:5]})).json()
    assert cut["choices"][0]["finish_reason"] == "stop"
    await client.post("/v1/completions", json=body)  # by now the engine has aborted the choice
    told = (await client.get(f"/v1/admin/requests/{cut['id']}")).json()
    assert len(told["choices"]) == 1 and told["cause"] != "backend", told


def test_a_disconnected_request_is_explained() -> None:
    requests, notes = OpenRequests(0), RequestNotes()
    requests.leave("gone", notes)
    aborted = TokenDelta("gone", 0, finish_reason="abort", timeline=QUICK)
    requests.deliver([aborted, TokenDelta("unknown", 0, timeline=QUICK)])
    assert notes.timelines == [QUICK]
    for number in range(MAX_LEFT):
        requests.leave(f"later{number}", RequestNotes())
    requests.deliver([aborted])
    assert len(notes.timelines) == 1, "too many clients have left since"


def test_an_answer_that_was_read_to_its_end_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    close = Ticket.close

    async def close_late(ticket: Ticket) -> None:
        await asyncio.to_thread(asked.wait, 30)
        await close(ticket)

    monkeypatch.setattr(Ticket, "close", close_late)
    with live_server() as live, ThreadPoolExecutor() as threads:
        url, history = f"{live.url}/v1/chat/completions", live.services.history
        with httpx.stream("POST", url, json=chat(stream=True)) as answer:
            lines = answer.iter_lines()
            first = events_of(next(lines) + "\n\n")[0]
            assert "data: [DONE]" in lines
            asking = threads.submit(httpx.get, f"{live.url}/v1/admin/requests/{first['id']}")
            wait_until(lambda: any(each.ended for each in list(history._open.values())))
            asked.set()
            told = asking.result()
        assert told.status_code == 200, told.text
        assert told.json()["completion_tokens"]


async def test_only_what_is_ending_is_waited_for() -> None:
    history = RequestHistory(2)
    running, ending = (RequestRecord(name, completion_id=name, tenant="a") for name in "xy")
    for record in (running, ending):
        history.begin(record)
    ending.is_ending = True
    assert await history.find("x", "a") is None
    assert await history.find("y", "b") is None
    asking = asyncio.create_task(history.find("y", "a"))
    while ending.ended is None:
        await asyncio.sleep(0)
    history.end(ending)
    assert await asking is ending
    history.end(running)
    assert await history.find("x", "a") is running


async def test_a_server_that_keeps_no_requests_collects_no_timelines() -> None:
    with live_server(FakeBackend(), requests={"keep": 0}) as live:
        httpx.post(f"{live.url}/v1/chat/completions", json=chat())
        assert live.backend.requests[-1].context.notes is None
        assert httpx.get(f"{live.url}/v1/admin/requests").json() == {"requests": [], "kept": 0}
