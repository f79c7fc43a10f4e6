"""/v1/conversations as OpenAI's own client speaks it, over a socket."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from engine.core.interfaces.backend import ChatRequest
from engine.servers.responses import conversations as module
from tests.support.fakes.fake_backend import MODEL, FakeBackend, call_script
from tests.support.servers.live_server import LiveServer, live_server

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
def client(server: LiveServer, backend: FakeBackend) -> OpenAI:
    return client_of(server)


def client_of(server: LiveServer, key: str = "none") -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def said(text: str, role: Any = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def texts(client: OpenAI, conversation_id: str, **query: Any) -> list[str]:
    found = client.conversations.items.list(conversation_id, **query)
    return [each.content[0].text for each in found if each.type == "message"]  # type: ignore[union-attr]


def prompt(backend: FakeBackend) -> list[str]:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return [message["content"] for message in request.messages]


def test_a_conversation_is_created_updated_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"})
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"} and changed.created_at == made.created_at
    assert client.conversations.retrieve(made.id) == changed
    assert client.conversations.delete(made.id).deleted
    for call in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)  # it is no response


def test_conversation_items_are_listed_in_pages_and_retrieved(client: OpenAI) -> None:
    made = client.conversations.create(items=[said("m0"), said("m1", "assistant")])
    added = client.conversations.items.create(made.id, items=[said(f"m{i}") for i in (2, 3, 4)])
    assert len(added.data) == 3 and not added.has_more
    assert texts(client, made.id) == ["m4", "m3", "m2", "m1", "m0"]
    page = client.conversations.items.list(made.id, order="asc", limit=2)
    assert page.has_more and len(page.data) == 2
    assert texts(client, made.id, order="asc", limit=2) == ["m0", "m1", "m2", "m3", "m4"]
    assert texts(client, made.id, after=added.data[0].id) == ["m1", "m0"]
    item_id = added.data[1].id
    assert item_id is not None
    item = client.conversations.items.retrieve(item_id, conversation_id=made.id)
    assert item == added.data[1]
    assert client.conversations.items.delete(item_id, conversation_id=made.id).id == made.id
    assert texts(client, made.id, order="asc") == ["m0", "m1", "m2", "m4"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(item_id, conversation_id=made.id)


def test_a_response_continues_and_extends_a_conversation(
    client: OpenAI, backend: FakeBackend
) -> None:
    made = client.conversations.create(items=[said("be kind", "developer")])
    first = client.responses.create(model=MODEL, input="hi", conversation=made.id)
    assert first.conversation is not None and first.conversation.id == made.id
    assert prompt(backend) == ["be kind", "hi"]
    tool: Any = {"type": "function", "name": "get", "parameters": {}, "strict": False}
    backend.script = call_script(("get", "{}"))
    called = client.responses.create(
        model=MODEL, input="now", conversation={"id": made.id}, tools=[tool], store=False
    )
    assert prompt(backend) == ["be kind", "hi", TEXT, "now"]
    backend.script = None
    call: Any = called.output[0]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    with client.responses.create(
        model=MODEL, input=[result], conversation=made.id, stream=True
    ) as stream:
        assert list(stream)[-1].type == "response.completed"
    assert prompt(backend)[-1] == "done"
    kinds = [each.type for each in client.conversations.items.list(made.id, order="asc")]
    asked, answered = ["message", "message"], ["function_call_output", "message"]
    assert kinds == ["message", *asked, "message", "function_call", *answered]
    counted = client.responses.input_tokens.count(model=MODEL, input="x", conversation=made.id)
    assert counted.input_tokens > 20


def test_an_item_is_added_to_a_conversation_once(client: OpenAI, backend: FakeBackend) -> None:
    made = client.conversations.create(items=[said("a")])
    first = client.responses.create(model=MODEL, input="b", conversation=made.id)
    old: Any = first.output[0].model_dump(exclude_none=True)
    with pytest.raises(openai.BadRequestError, match="an item in the conversation"):
        client.responses.create(model=MODEL, input=[old], conversation=made.id)
    with pytest.raises(openai.BadRequestError, match="an item in the conversation"):
        client.conversations.items.create(made.id, items=[old])
    with pytest.raises(openai.BadRequestError, match="an earlier item"):
        client.conversations.create(items=[old, old])
    reference: Any = {"type": "item_reference", "id": old["id"]}
    client.responses.create(model=MODEL, input=[reference, said("c")], conversation=made.id)
    assert prompt(backend) == ["a", "b", TEXT, TEXT, "c"]
    assert texts(client, made.id, order="asc") == ["a", "b", TEXT, "c", TEXT]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, "excludes"),
        ({"conversation": {"id": "x", "more": 1}}, "more"),
        ({"conversation": 5}, "conversation: should be a string"),
        ({"conversation": "conv_absent"}, "There is no conversation 'conv_absent'"),
        ({"conversation": "resp_absent"}, "There is no conversation 'resp_absent'"),
    ],
)
def test_invalid_conversation_references_are_refused(
    client: OpenAI, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=match) as caught:
        client.responses.create(model=MODEL, input="a", **fields)
    assert caught.value.status_code in (400, 404)
    assert str(caught.value.body["param"]).startswith("conversation")  # type: ignore[index]


def test_conversation_items_are_bounded(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 20 items"):
        client.conversations.create(items=[said("a")] * 21)
    monkeypatch.setattr(module, "MAX_ITEMS", 3)
    made = client.conversations.create(items=[said("a"), said("b")])
    with pytest.raises(openai.BadRequestError, match="longer than 3 items"):
        client.conversations.items.create(made.id, items=[said("c"), said("d")])
    assert texts(client, made.id) == ["b", "a"]
    client.responses.create(model=MODEL, input="c", conversation=made.id)
    with pytest.raises(openai.BadRequestError, match="longer than 3 items"):
        client.responses.create(model=MODEL, input="d", conversation=made.id)
    monkeypatch.setattr(module, "MAX_CONVERSATION_BYTES", 1000)
    small = client.conversations.create()
    with pytest.raises(openai.BadRequestError, match="longer than"):
        client.conversations.items.create(small.id, items=[said("x" * 2000)])


def test_conversations_are_private_survive_a_restart_and_are_bounded(tmp_path: Path) -> None:
    storage = {"path": tmp_path, "max_responses": 4}
    with live_server(storage=storage, server={"api_key": KEY}) as server:
        made = client_of(server, KEY).conversations.create(items=[said("a secret")])
    with live_server(storage=storage, server={"api_key": KEY[::-1]}) as server:
        other = client_of(server, KEY[::-1])
        for call in (
            lambda: other.conversations.retrieve(made.id),
            lambda: other.conversations.update(made.id, metadata={}),
            lambda: other.conversations.delete(made.id),
            lambda: other.conversations.items.list(made.id),
            lambda: other.conversations.items.create(made.id, items=[said("b")]),
            lambda: other.responses.create(model=MODEL, input="b", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
    with live_server(storage=storage, server={"api_key": KEY}) as server:
        client = client_of(server, KEY)
        assert texts(client, made.id) == ["a secret"]
        newer = client.conversations.create(items=[said("b")])
        client.conversations.items.create(made.id, items=[said("c")])  # it was used last
        for _ in range(2):
            client.conversations.create()
        assert texts(client, made.id) == ["c", "a secret"]
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(newer.id)
