"""/v1/embeddings, /v1/rerank and /v1/score over a backend without a model."""

import asyncio
import base64
from collections.abc import Iterator

import httpx
import msgspec
import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import Embeddings, EmbedRequest, ModelCard, TextPair
from tests.support.fakes.fake_backend import MODEL, NUM_DIMENSIONS, FakeBackend
from tests.support.servers.live_server import LiveServer, live_server, wait_until

PLACES = {"cat": (1, 0), "kitten": (0.9, 0.1), "car": (0, 1), "kettle": (0, 1)}


class PlacedBackend(FakeBackend):
    """Knows where some words lie; never answers when asked to `hang`."""

    async def embed(self, request: EmbedRequest) -> Embeddings:
        if "hang" in request.inputs:
            self.num_open += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.num_open -= 1
        if not set(request.inputs) <= PLACES.keys():
            return await super().embed(request)
        self.embed_requests.append(request)
        # Not of unit length: a score must not depend on it.
        rows = [np.array(PLACES[each], np.float32) * 3 for each in request.inputs]
        return Embeddings(np.stack(rows), len(request.inputs))


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    with live_server(PlacedBackend()) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> LiveServer:
    shared.backend.reset()
    return shared


def post(server: LiveServer, path: str = "/v1/embeddings", **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": MODEL} | body, timeout=60)


def vectors(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


def test_inputs_may_be_llamacpps_objects(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "ca"}, {"type": "text", "text": "t"}]
    post(server, input=["car", {"prompt_string": "cat"}, {"content": parts}])
    post(server, input={"prompt_string": "cat"})
    first, second = server.backend.embed_requests
    assert (first.inputs, second.inputs) == (("car", "cat", "cat"), ("cat",))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for wrong, param in (
        ({}, "input"),
        ({"prompt_string": ""}, "input"),
        ({"text": "a"}, "input.text"),
        ({"content": "cat"}, "input.content"),
        ({"content": []}, "input"),
        ({"content": [image]}, "input.content[0].type"),
        ({"content": parts, "prompt_string": "a"}, "input.prompt_string"),
    ):
        refused = post(server, input=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_embedding_inputs_keep_order_and_count_usage(server: LiveServer) -> None:
    many = post(server, input=["one word", "two words more", "x"])
    body = many.json()
    assert body["object"] == "list" and body["model"] == MODEL
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert all(item["object"] == "embedding" for item in body["data"])
    alone = post(server, input="two words more")
    assert np.array_equal(vectors(alone)[0], vectors(many)[1])
    assert vectors(post(server, input=[5, 6])).shape == (1, NUM_DIMENSIONS)
    assert vectors(post(server, input=[[5, 6], [7]])).shape == (2, NUM_DIMENSIONS)
    asked = [request.inputs for request in server.backend.embed_requests]
    assert asked[2:] == [((5, 6),), ((5, 6), (7,))]


def test_base64_is_little_endian_float32(server: LiveServer) -> None:
    plain = vectors(post(server, input="text", encoding_format="float"))[0]
    packed = post(server, input="text", encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), plain)


def test_dimensions_are_truncated_rescaled_and_warned_about(server: LiveServer) -> None:
    whole = vectors(post(server, input="text"))[0]
    short = post(server, input="text", dimensions=3)
    expected = whole[:3] / np.linalg.norm(whole[:3])
    np.testing.assert_allclose(vectors(short)[0], expected, rtol=1e-6)
    assert "dimensions: emulated" in short.headers["x-engine-warnings"]
    same = post(server, input="text", dimensions=NUM_DIMENSIONS)
    assert np.array_equal(vectors(same)[0], whole)
    assert "x-engine-warnings" not in same.headers
    error = post(server, input="text", dimensions=NUM_DIMENSIONS + 1).json()["error"]
    assert error["param"] == "dimensions" and str(NUM_DIMENSIONS) in error["message"]


def test_a_strict_server_emulates_nothing() -> None:
    with live_server(server={"strict": True}) as server:
        refused = post(server, input="text", dimensions=3)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "dimensions"
        server.backend.set_card(emulated=("embeddings",))
        assert post(server, input="text").json()["error"]["param"] == "model"


def test_embeddings_of_a_generation_model_come_with_a_warning(server: LiveServer) -> None:
    server.backend.set_card(emulated=("embeddings",))
    assert "pooled" in post(server, input="text").headers["x-engine-warnings"]
    server.backend.set_card(capabilities=("completions",))
    refused = post(server, input="text")
    assert refused.status_code == 400 and "gives no embeddings" in refused.text


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": None}),
        ("input.text", {"input": {"text": "x"}}),
        ("input", {"input": ["x"] * 2049}),
        ("input[1]", {"input": ["x", ""]}),
        ("input[1]", {"input": ["x", []]}),
        ("input[1]", {"input": ["x", None]}),
        ("input", {"input": [1, "x"]}),
        ("input", {"input": [1, -1]}),
        ("input[0]", {"input": [[True]]}),
        ("input", {}),
        ("encoding_format", {"input": "x", "encoding_format": "int8"}),
        ("dimensions", {"input": "x", "dimensions": 0}),
        ("truncate_prompt_tokens", {"input": "x", "truncate_prompt_tokens": 0}),
        ("input_type", {"input": "x", "input_type": "query"}),
    ],
)
def test_invalid_embedding_requests_are_refused_by_name(
    server: LiveServer, param: str, body: dict[str, object]
) -> None:
    refused = post(server, **body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert not server.backend.embed_requests


def test_embedding_ids_beyond_the_vocabulary_are_refused_with_advice(server: LiveServer) -> None:
    server.backend.refusal = InvalidRequestError("91 is not a token id.", param="input")
    refused = post(server, input=[91]).json()["error"]
    assert refused["message"].startswith("91 is not a token id.") and refused["param"] == "input"
    assert "check_embedding_ctx_length=False" in refused["message"]
    assert "tiktoken" not in post(server, input="text").text
    server.backend.refusal = InvalidRequestError("Long.", code="context_length_exceeded")
    assert "tiktoken" not in post(server, input=[91]).text


def test_embedding_options_reach_the_backend(server: LiveServer) -> None:
    post(server, input="x", truncate_prompt_tokens=-1, priority=3, user="someone")
    (asked,) = server.backend.embed_requests
    assert (asked.truncate_prompt_tokens, asked.priority) == (-1, 3)
    assert asked.timeout_s is not None


def test_embedding_requests_are_counted_and_release_admission(server: LiveServer) -> None:
    def count(outcome: str) -> float:
        rows = httpx.get(f"{server.url}/metrics").text.splitlines()
        (row,) = [r for r in rows if r.startswith("engine_requests_total{") and outcome in r]
        return float(row.rsplit(" ", 1)[1])

    before = count("ok"), count("refused")
    post(server, input="x")
    server.backend.refusal = InvalidRequestError("This input is too long.", param="input")
    refused = post(server, input="x")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    wait_until(lambda: server.services.lifecycle.num_admitted == 0)
    assert (count("ok"), count("refused")) == (before[0] + 1, before[1] + 1)


def test_a_client_disconnect_aborts_embedding(server: LiveServer) -> None:
    with server.connect() as connection:
        server.post_raw(connection, "/v1/embeddings", {"model": MODEL, "input": "hang"})
        wait_until(lambda: server.backend.num_open == 1)
    wait_until(lambda: server.backend.num_open == 0)
    wait_until(lambda: server.services.lifecycle.num_admitted == 0)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_rerank_orders_documents_by_relevance(server: LiveServer, path: str) -> None:
    documents = ["car", {"text": "kitten"}, "kettle", "cat"]
    body = post(server, path, query="cat", documents=documents).json()
    assert [result["index"] for result in body["results"]] == [3, 1, 0, 2], "equals keep order"
    assert [result["document"]["text"] for result in body["results"]][:2] == ["cat", "kitten"]
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores[0] == pytest.approx(1) and scores[1] == pytest.approx(0.9939, abs=1e-4)
    assert body["model"] == MODEL and body["id"].startswith("rerank-")
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_rerank_supports_top_n_and_return_documents(server: LiveServer) -> None:
    body = post(
        server,
        "/v1/rerank",
        query="cat",
        documents=["car", "kitten", "cat"],
        top_n=2,
        return_documents=False,
    ).json()
    assert [result["index"] for result in body["results"]] == [2, 1]
    assert all("document" not in result for result in body["results"])


def test_score_compares_text_1_with_each_text_2(server: LiveServer) -> None:
    one = post(server, "/v1/score", text_1="cat", text_2=["cat", "car"]).json()
    assert one["object"] == "list" and one["model"] == MODEL
    assert [item["index"] for item in one["data"]] == [0, 1]
    assert [item["object"] for item in one["data"]] == ["score", "score"]
    assert [item["score"] for item in one["data"]] == pytest.approx([1, 0], abs=1e-6)
    pairs = post(server, "/v1/score", text_1=["cat", "car"], text_2=["car", "kettle"]).json()
    assert [item["score"] for item in pairs["data"]] == pytest.approx([0, 1], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/rerank", "query", {"query": "", "documents": ["x"]}),
        ("/v1/rerank", "documents", {"query": "x", "documents": []}),
        ("/v1/rerank", "documents[1]", {"query": "x", "documents": ["x", ""]}),
        ("/v1/rerank", "documents[0]", {"query": "x", "documents": [{"body": "x"}]}),
        ("/v1/rerank", "top_n", {"query": "x", "documents": ["x"], "top_n": -1}),
        ("/v1/rerank", "rank_fields", {"query": "x", "documents": ["x"], "rank_fields": ["a"]}),
        ("/v1/score", "text_2", {"text_1": ["x", "y"], "text_2": ["x"]}),
        ("/v1/score", "text_1[0]", {"text_1": [""], "text_2": "x"}),
    ],
)
def test_invalid_rerank_and_score_requests_are_named(
    server: LiveServer, path: str, param: str, body: dict[str, object]
) -> None:
    refused = post(server, path, **body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "cat", "documents": ["car"]}),
        ("/v1/score", {"text_1": "cat", "text_2": "car"}),
    ],
)
def test_score_and_rerank_need_a_model_trained_for_them(
    server: LiveServer, path: str, body: dict[str, object]
) -> None:
    server.backend.set_card(capabilities=("embeddings",), emulated=("embeddings",))
    refused = post(server, path, **body)
    assert refused.status_code == 400
    assert "not trained to compare" in refused.json()["error"]["message"]
    assert not server.backend.embed_requests


class PairBackend(FakeBackend):
    """A reranker. The score of a pair is the share of the query's letters in the document."""

    def models(self) -> list[ModelCard]:
        (card,) = super().models()
        return [msgspec.structs.replace(card, capabilities=("rerank", "score"))]

    async def embed(self, request: EmbedRequest) -> Embeddings:
        self.embed_requests.append(request)
        rows = []
        for index, pair in enumerate(request.inputs):
            assert isinstance(pair, TextPair)
            if pair.second == "long":
                name = "input" if len(request.inputs) == 1 else f"input[{index}]"
                raise InvalidRequestError(f"However, {name} has 9 tokens.", param=name)
            letters = set(pair.first)
            rows.append([len(letters & set(pair.second)) / len(letters)])
        return Embeddings(np.array(rows, np.float32), 3 * len(rows))


@pytest.fixture(scope="module")
def reranker() -> Iterator[LiveServer]:
    with live_server(PairBackend()) as server:
        yield server


def test_a_reranker_scores_pairs(reranker: LiveServer) -> None:
    asked = {"query": "cat", "documents": ["dog", "cart", "act up", "tea"]}
    body = post(reranker, "/v1/rerank", **asked, top_n=3).json()
    assert [result["index"] for result in body["results"]] == [1, 2, 3]
    assert body["results"][0]["relevance_score"] == 1
    assert body["usage"]["prompt_tokens"] == 12
    scores = post(reranker, "/v1/score", text_1="cat", text_2=["dog", "tea"]).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx([0, 2 / 3])
    paired = post(reranker, "/v1/score", text_1=["ab", "cd"], text_2=["b", "cd"]).json()["data"]
    assert [each["score"] for each in paired] == [0.5, 1]
    assert post(reranker, input="cat").status_code == 400


def test_an_error_in_a_rerank_pair_names_its_document(reranker: LiveServer) -> None:
    for documents, name in ((["a", "long"], "documents[1]"), (["long"], "documents[0]")):
        refused = post(reranker, "/v1/rerank", query="cat", documents=documents)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == name
        assert error["message"] == f"However, {name} has 9 tokens."
    error = post(reranker, "/v1/score", text_1="cat", text_2="long").json()["error"]
    assert error["param"] == "text_2[0]"


class PromptedBackend(FakeBackend):
    """A sentence encoder whose files have prompts."""

    def models(self) -> list[ModelCard]:
        (card,) = super().models()
        return [msgspec.structs.replace(card, prompt_names=("passage", "query"))]


def test_prompt_name_selects_an_embedding_prompt_and_rerank_has_its_own() -> None:
    backend = PromptedBackend()
    with live_server(backend) as server:
        assert post(server, input=["a", "b"], prompt_name="query").status_code == 200
        assert post(server, input="a").status_code == 200
        post(server, "/v1/rerank", query="a", documents=["b", "c"])
        names = [request.prompt_names for request in backend.embed_requests]
        assert names == [("query", "query"), (), ("query", "passage", "passage")]
        for asked, message in (
            ({"input": "a", "prompt_name": "poem"}, "its prompts are: passage, query"),
            ({"input": [1, 2], "prompt_name": "query"}, "token ids"),
        ):
            error = post(server, **asked).json()["error"]
            assert error["param"] == "prompt_name" and message in error["message"]
