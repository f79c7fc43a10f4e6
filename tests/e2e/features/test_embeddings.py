"""Clients against `engine serve` on a real sentence encoder."""

import base64
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import psutil
import pytest
from langchain_openai import OpenAIEmbeddings

from engine.core.store.pull import pull
from tests.support.servers.served import ServedEngine, serve

MODEL = "all-minilm-l6-v2"
NUM_DIMENSIONS = 384
QUERY = "How do I keep my cat healthy?"
DOCUMENTS = [
    "Stock markets fell sharply on Monday.",
    "Feed your kitten good food and take it to the vet every year.",
    "The recipe needs two eggs and a cup of flour.",
    "Pets live longer when they get exercise.",
]


@pytest.fixture(scope="module")
def encoder_server() -> Iterator[ServedEngine]:
    pull(MODEL)
    with serve(MODEL, "--dtype", "float32") as served:
        yield served


@pytest.fixture(scope="module")
def client(encoder_server: ServedEngine) -> Iterator[openai.OpenAI]:
    url = f"{encoder_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def post(server: ServedEngine, path: str, **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": MODEL} | body, timeout=60)


def test_the_official_client_gets_the_same_vectors_in_both_encodings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model=MODEL, input=DOCUMENTS)  # it asks for base64
    plain = client.embeddings.create(model=MODEL, input=DOCUMENTS, encoding_format="float")
    ours = np.array([item.embedding for item in packed.data])
    np.testing.assert_allclose(ours, [item.embedding for item in plain.data], atol=1e-6)
    assert ours.shape == (len(DOCUMENTS), NUM_DIMENSIONS)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    assert [item.index for item in packed.data] == [0, 1, 2, 3]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 40
    alone = client.embeddings.create(model=MODEL, input=DOCUMENTS[2]).data[0].embedding
    np.testing.assert_allclose(alone, ours[2], atol=1e-5)


def test_many_inputs_keep_their_order(client: openai.OpenAI) -> None:
    words = [f"number {i}" for i in range(600)]
    made = client.embeddings.create(model=MODEL, input=words)
    some = client.embeddings.create(model=MODEL, input=[words[0], words[599], words[300]])
    for item, place in zip(some.data, (0, 599, 300), strict=True):
        np.testing.assert_allclose(item.embedding, made.data[place].embedding, atol=1e-5)


def test_langchain_embeddings_rank_the_most_similar_document_first(
    encoder_server: ServedEngine,
) -> None:
    embeddings = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{encoder_server.url}/v1",
        api_key="unused",
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    documents = np.array(embeddings.embed_documents(DOCUMENTS))
    scores = documents @ np.array(embeddings.embed_query(QUERY))
    assert scores.argmax() == 1 and scores[3] > max(scores[0], scores[2])
    assert scores[1] > 0.3 > max(scores[0], scores[2])


def test_litellm_embeds_and_reranks(
    encoder_server: ServedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch one when imported
    import litellm

    name = f"hosted_vllm/{MODEL}"
    made = litellm.embedding(model=name, input=[QUERY], api_base=f"{encoder_server.url}/v1")
    assert len(made.data[0]["embedding"]) == NUM_DIMENSIONS
    for base in (encoder_server.url, f"{encoder_server.url}/v1"):
        ranked = litellm.rerank(model=name, query=QUERY, documents=DOCUMENTS, api_base=base)
        assert [result["index"] for result in ranked.results][:2] == [1, 3]


def test_rerank_and_score_agree(encoder_server: ServedEngine) -> None:
    ranked = post(encoder_server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=3).json()
    assert [result["index"] for result in ranked["results"]][:2] == [1, 3]
    assert len(ranked["results"]) == 3
    scores = post(encoder_server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    for result in ranked["results"]:
        expected = scores[result["index"]]["score"]
        assert result["relevance_score"] == pytest.approx(expected, abs=1e-5)
        assert result["document"]["text"] == DOCUMENTS[result["index"]]


def test_embedding_dimensions_are_truncated_rescaled_and_warned_about(
    encoder_server: ServedEngine,
) -> None:
    whole = post(encoder_server, "/v1/embeddings", input=QUERY).json()["data"][0]["embedding"]
    short = post(encoder_server, "/v1/embeddings", input=QUERY, dimensions=64)
    vector = np.array(short.json()["data"][0]["embedding"])
    np.testing.assert_allclose(vector, np.array(whole[:64]) / np.linalg.norm(whole[:64]), atol=1e-5)
    assert "dimensions" in short.headers["x-engine-warnings"]


def test_long_embedding_inputs_are_refused_or_truncated_as_requested(
    encoder_server: ServedEngine,
) -> None:
    long = "A cat sat on a mat. " * 200
    refused = post(encoder_server, "/v1/embeddings", input=long)
    assert refused.status_code == 400
    assert "maximum context length is 256 tokens" in refused.json()["error"]["message"]
    cut = post(encoder_server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1).json()
    assert cut["usage"]["prompt_tokens"] == 256
    few = post(encoder_server, "/v1/embeddings", input=long, truncate_prompt_tokens=9).json()
    # As sentence encoders are used: the beginning stays, between the tokens around it.
    same = post(encoder_server, "/v1/embeddings", input="a cat sat on a mat .").json()
    np.testing.assert_allclose(few["data"][0]["embedding"], same["data"][0]["embedding"], atol=1e-5)


def test_token_ids_of_another_vocabulary_are_refused_with_advice(
    encoder_server: ServedEngine, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model=MODEL, input=[[9906, 100_257]])
    own = httpx.post(f"{encoder_server.url}/tokenize", json={"model": MODEL, "prompt": QUERY})
    by_ids = post(
        encoder_server, "/v1/embeddings", input=own.json()["tokens"], encoding_format="base64"
    ).json()
    by_text = post(encoder_server, "/v1/embeddings", input=QUERY).json()
    vector = np.frombuffer(base64.b64decode(by_ids["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, by_text["data"][0]["embedding"], atol=1e-6)


def test_an_encoder_model_refuses_chat_and_completions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.completions.create(model=MODEL, prompt="Once", max_tokens=2)


def test_model_entry_lists_the_capabilities_of_an_encoder(client: openai.OpenAI) -> None:
    entry = client.models.retrieve(MODEL)
    assert {"embeddings", "score"} <= set(entry.capabilities)
    assert not {"chat", "completions"} & set(entry.capabilities)
    assert entry.max_model_len == 256


def test_no_process_of_an_encoder_server_loads_pytorch(encoder_server: ServedEngine) -> None:
    post(encoder_server, "/v1/embeddings", input=QUERY)
    server = psutil.Process(encoder_server.process.pid)
    for each in (server, *server.children(recursive=True)):
        assert not [entry.path for entry in each.memory_maps() if "torch" in entry.path]
