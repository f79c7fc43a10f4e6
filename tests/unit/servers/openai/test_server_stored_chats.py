"""Stored chat completions as OpenAI's own client reads them, over a socket."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from engine.core.errors import InferenceError
from tests.support.fakes.fake_backend import MODEL, FakeBackend, call_script
from tests.support.servers.live_server import LiveServer, chat, live_server

TEXT = "Hello from a fake model."
KEY = "key-of-one-tenant"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(storage={"path": tmp_path_factory.mktemp("storage")}) as server:
        yield server


@pytest.fixture
def backend(server: LiveServer) -> FakeBackend:
    server.backend.reset()
    return server.backend


@pytest.fixture
def client(server: LiveServer, backend: FakeBackend) -> Iterator[OpenAI]:
    client = client_of(server)
    yield client
    for each in list(client.chat.completions.list()):
        client.chat.completions.delete(each.id)


def client_of(server: LiveServer, key: str = "none") -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "hi"}]
    given = {"model": MODEL, "messages": messages, "store": True} | fields
    return client.chat.completions.create(**given)


def test_a_stored_chat_is_read_updated_and_deleted(client: OpenAI) -> None:
    made = ask(client, metadata={"a": "b"}, n=2, logprobs=True)
    stored = client.chat.completions.retrieve(made.id)
    assert stored == made
    changed = client.chat.completions.update(made.id, metadata={"c": "d"})
    assert changed.model_extra is not None and changed.model_extra["metadata"] == {"c": "d"}
    assert client.chat.completions.retrieve(made.id) == changed
    assert client.chat.completions.delete(made.id).deleted
    for call in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            call(made.id)


def test_a_streamed_chat_is_stored_before_its_end(client: OpenAI, backend: FakeBackend) -> None:
    tool: Any = {"type": "function", "function": {"name": "get"}}
    backend.script = call_script(("get", '{"a": 1}'), said="Well.")
    chunks = list(ask(client, stream=True, tools=[tool]))
    stored = client.chat.completions.retrieve(chunks[0].id)
    choice = stored.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert call.function.arguments == '{"a": 1}'
    assert stored.usage is not None and stored.usage.prompt_tokens == 1


def test_only_requested_and_complete_chats_are_stored(client: OpenAI, backend: FakeBackend) -> None:
    ask(client, store=False)
    ask(client, store=None)
    backend.failure, backend.fail_after = InferenceError("Not finite."), 2
    with pytest.raises(openai.APIError):
        list(ask(client, stream=True))
    assert list(client.chat.completions.list()) == []


def test_stored_chats_are_listed_with_filters_and_pages(client: OpenAI) -> None:
    made = [ask(client, metadata={"i": str(i % 2), "all": "x"}).id for i in range(5)]

    def ids(**query: Any) -> list[str]:
        return [each.id for each in client.chat.completions.list(**query)]

    assert ids() == made
    assert ids(limit=2) == made  # the client turns the pages
    assert client.chat.completions.list(limit=2).has_more
    assert ids(order="desc", after=made[3]) == made[2::-1]
    assert ids(metadata={"i": "1", "all": "x"}) == made[1::2]
    assert ids(metadata={"i": "1", "none": "x"}) == []
    assert ids(model=MODEL) == made and ids(model="another") == []
    client.chat.completions.update(made[0], metadata={"i": "1"})
    assert ids(metadata={"i": "1"}) == [made[0], *made[1::2]]
    for wrong in ({"limit": 0}, {"order": "up"}, {"extra_query": {"x": "1"}}):
        with pytest.raises(openai.BadRequestError):
            ids(**wrong)
    with pytest.raises(openai.NotFoundError):
        ids(after="chatcmpl-absent")


def test_the_messages_of_a_stored_chat_are_those_of_the_request(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    sent = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    made = ask(client, messages=sent)
    listing = client.chat.completions.messages
    found = list(listing.list(made.id, limit=3))
    assert [each.content for each in found] == ["be kind", "ab", None, "done"]
    assert [part.model_dump(exclude_none=True) for part in found[1].content_parts or ()] == parts
    assert found[2].tool_calls is not None
    assert len({each.id for each in found}) == 4
    newest = listing.list(made.id, order="desc", after=found[2].id).data
    assert [each.content for each in newest] == ["ab", "be kind"]
    with pytest.raises(openai.BadRequestError, match="none of these items"):
        listing.list(made.id, after="x")


def test_stored_chats_are_private_and_survive_a_restart(tmp_path: Path) -> None:
    storage = {"path": tmp_path}
    with live_server(storage=storage, server={"api_key": KEY}) as server:
        made = ask(client_of(server, KEY))
    with live_server(storage=storage, server={"api_key": KEY[::-1]}) as server:
        other = client_of(server, KEY[::-1])
        assert list(other.chat.completions.list()) == []
        for call in (
            lambda: other.chat.completions.retrieve(made.id),
            lambda: other.chat.completions.update(made.id, metadata={}),
            lambda: other.chat.completions.delete(made.id),
            lambda: other.chat.completions.messages.list(made.id),
            lambda: other.chat.completions.list(after=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
    with live_server(storage=storage, server={"api_key": KEY}) as server:
        assert [each.id for each in client_of(server, KEY).chat.completions.list()] == [made.id]


def test_a_broken_storage_refuses_a_stored_chat_before_generation(tmp_path: Path) -> None:
    broken = tmp_path / "file"
    broken.write_text("not a directory")
    with live_server(storage={"path": broken}) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json=chat(store=True)).status_code == 503
        assert server.backend.requests == []
        assert httpx.post(url, json=chat()).status_code == 200
