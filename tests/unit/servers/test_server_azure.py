"""Azure's paths: the client that OpenAI makes for them, and what a deployment decides."""

from collections.abc import Iterator

import httpx
import pytest
from openai import AzureOpenAI, NotFoundError

from engine.core.interfaces.backend import ChatRequest
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import LiveServer, chat, live_server, wait_until

KEY = "k" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(server={"api_key": KEY}) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[AzureOpenAI]:
    with AzureOpenAI(
        azure_endpoint=server.url, api_key=KEY, api_version="2024-10-21", max_retries=0
    ) as client:
        yield client


def test_the_azure_openai_client_works(client: AzureOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages)
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    pieces = [part.choices[0].delta.content or "" for part in stream]
    assert whole.choices[0].message.content == "".join(pieces) == "Hello from a fake model."
    text = client.completions.create(model=MODEL, prompt="a", max_tokens=2)
    assert text.choices[0].text == "Hello from"
    assert len(client.embeddings.create(model=MODEL, input="a").data[0].embedding) == 8
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="absent", messages=messages)


def test_the_azure_deployment_is_the_model(server: LiveServer) -> None:
    assert isinstance(server.backend, FakeBackend)
    server.backend.reset()
    url = f"{server.url}/openai/deployments/{MODEL}/chat/completions?api-version=2024-10-21"
    keyed = {"api-key": KEY}
    for body in (chat(model="gpt-4o"), {"messages": chat()["messages"]}):
        assert httpx.post(url, json=body, headers=keyed).status_code == 200
    for request in server.backend.requests:
        assert isinstance(request, ChatRequest) and request.context.model == MODEL
    assert httpx.post(url, json=chat()).status_code == 401
    wrong = httpx.post(url, json=chat(n=0), headers=keyed)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"
    assert server.services.lifecycle.num_admitted == 0


def test_a_disconnect_through_azure_routes_is_noticed(server: LiveServer) -> None:
    assert isinstance(server.backend, FakeBackend)
    server.backend.reset(["word"] * 1000)
    server.backend.token_s = 0.01
    url = f"{server.url}/openai/deployments/{MODEL}/chat/completions"
    with httpx.stream("POST", url, json=chat(stream=True), headers={"api-key": KEY}) as response:
        next(response.iter_lines())
    wait_until(lambda: server.backend.num_cut_short == 1)
    server.backend.reset()
