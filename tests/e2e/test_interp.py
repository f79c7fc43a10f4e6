"""Activations of the default model as users read and change them: over HTTP and in Python."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.core.errors import NotFoundError
from engine.core.interp.vectors import VectorStore
from engine.core.key_file import add_key
from engine.core.tensor_file import unpack_tensors
from engine.library.interp import Remote
from engine.library.steering import tensors_of, train
from tests.conftest import DEFAULT_MODEL
from tests.served import ServedEngine, serve

PROMPT = "The capital of France is"
SITE = "blocks.12.hook_resid_post"


class Client:
    """One of the two tenants of the server."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=100
        )
        self.remote = Remote(url, key)

    def run(self, interp: Any, prompt: str = PROMPT) -> httpx.Response:
        return self.http.post("/v1/interp/run", json={"prompt": prompt, "interp": interp})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interp")


@pytest.fixture(scope="module")
def clients(folder: Path, default_model: Path) -> Iterator[tuple[Client, Client, ServedEngine]]:
    keys = [add_key(folder / "keys.json", name, tenant=name)[0] for name in ("one", "two")]
    variables = {
        "LLM_ENGINE_SERVER__KEYS_FILE": str(folder / "keys.json"),
        "LLM_ENGINE_INTERP__VECTORS_DIR": str(folder / "vectors"),
        "LLM_ENGINE_INTERP__MAX_CAPTURE_MB": "2",
    }
    with serve(DEFAULT_MODEL, env=variables) as served:
        one, two = (Client(served.url, key) for key in keys)
        yield one, two, served


def test_what_is_read_over_http_says_where_it_is_from(clients: Any) -> None:
    one, _, _ = clients
    sites = one.http.get("/v1/interp/sites").json()["data"]
    shapes = {each["name"]: each["shape"] for each in sites}
    assert shapes[SITE] == [576] and shapes["blocks.0.attn.hook_q"] == [9, 64]
    interp = {
        "capture": [{"site": SITE, "positions": "last"}],
        "lens": {"layers": [0, 29], "top": 2},
        "attention": {"layers": [3], "heads": [1]},
        "attribution": {"target": " Paris"},
    }
    answer = one.run(interp).json()
    told = answer["interp"]
    assert answer["next_token"]["text"] == " Paris" and told["inline"] and told["id"] is None
    (captured,) = told["captures"]
    assert np.shape(captured["values"]) == (1, 576) and captured["positions"] == [4]
    assert told["lens"][-1]["top"][0]["token"] == " Paris"
    assert "".join(told["tokens"]) == PROMPT + " Paris"
    assert sum(told["attention"][0]["values"][0][0]) == pytest.approx(1, abs=1e-5)
    assert told["attribution"]["total"] > 10


def test_a_steered_chat_differs_and_its_neighbour_does_not(clients: Any) -> None:
    one, _, _ = clients
    vector = np.random.default_rng(0).normal(size=576).tolist()
    body = {
        "messages": [{"role": "user", "content": "Say hi."}],
        "max_tokens": 8,
        "temperature": 0,
    }

    def text(scale: float) -> str:
        edit = {"site": SITE, "op": "add", "vector": vector, "scale": scale}
        asked = body | ({"interp": {"edit": [edit]}} if scale else {})
        answer = one.http.post("/v1/chat/completions", json=asked).json()
        return str(answer["choices"][0]["message"]["content"])

    plain = text(0)
    assert text(8) != plain
    assert text(0) == plain


def test_large_results_are_fetched_by_their_owner(clients: Any) -> None:
    one, two, _ = clients
    body = {
        "prompt": PROMPT * 40,
        "max_tokens": 3,
        "interp": {"capture": [{"site": SITE}]},
    }
    told = one.http.post("/v1/completions", json=body).json()["interp"]
    assert not told["inline"] and "values" not in told["captures"][0]
    path = f"/v1/interp/results/{told['id']}"
    tensors, metadata = unpack_tensors(one.http.get(path).content)
    shape = told["captures"][0]["shape"]
    assert list(tensors[0].shape) == shape and json.loads(metadata["interp"])["token_ids"]
    assert two.http.get(path).status_code == 404
    assert two.http.delete(path).status_code == 404
    patch = {"edit": [{"site": SITE, "op": "patch", "from": {"id": told["id"]}}]}
    assert two.run(patch).status_code == 404
    assert one.http.delete(path).status_code == 200
    assert one.http.get(path).status_code == 404


@pytest.mark.parametrize(
    ("interp", "status"),
    [
        ({"capture": [{"site": "blocks.99.hook_resid_post"}]}, 400),
        ({"edit": [{"site": SITE, "op": "add", "vector": [1.0, 2.0]}]}, 400),
        ({"edit": [{"site": SITE, "op": "add", "vector": "unknown"}]}, 404),
        ({"edit": [{"site": SITE, "op": "add", "vector": "../../keys"}]}, 400),
        ({"capture": [{"site": f"blocks.{n}.mlp.hook_post"} for n in range(30)]}, 400),
        ({"edit": [{"site": SITE, "op": "eval"}]}, 400),
        ("code", 400),
    ],
)
def test_bad_input_is_refused_with_a_sentence(clients: Any, interp: Any, status: int) -> None:
    one, _, _ = clients
    answer = one.run(interp, PROMPT * 8)
    assert answer.status_code == status, answer.text
    assert len(answer.json()["error"]["message"]) > 20
    assert one.run({}).status_code == 200


def test_a_trace_saves_steers_and_patches(clients: Any, folder: Path) -> None:
    one, _, _ = clients
    with one.remote.trace("The capital of Italy is") as other:
        saved = other.blocks[29].resid_post.save("last")
    assert saved.value.shape == (1, 576) and other.text == " Rome"
    with one.remote.trace(PROMPT) as t:
        t.blocks[29].resid_post.patch(saved, source="last", positions=[-1])
    assert t.text == " Rome"
    with one.remote.trace(PROMPT) as lens:
        lens.lens([29], top=1)
    assert lens.output.token_text(lens.output.lens[0]["top"][0][0]) == " Paris"
    vectors = train(one.remote, ["I am happy", "So glad"], ["I am sad", "So upset"], [12])
    VectorStore(folder / "vectors").save("glad", tensors_of(vectors), {})
    assert one.http.get("/v1/interp/vectors").json()["data"][0]["name"] == "glad"
    with one.remote.trace(PROMPT, max_tokens=4) as plain:
        pass
    with one.remote.trace(PROMPT, max_tokens=4) as steered:
        steered.blocks[12].resid_post.add("glad", scale=20)
    assert plain.text != steered.text
    with pytest.raises(NotFoundError), one.remote.trace(PROMPT) as wrong:
        wrong.blocks[12].resid_post += "sad"


def test_features_of_an_autoencoder_are_read_and_clamped(clients: Any, folder: Path) -> None:
    one, _, _ = clients
    rng = np.random.default_rng(0)
    decoder = rng.normal(size=(16, 576)).astype(np.float32)
    decoder /= np.linalg.norm(decoder, axis=1, keepdims=True)
    sae = {"W_enc": decoder.T.copy(), "W_dec": decoder, "b_enc": np.zeros(16, np.float32)}
    VectorStore(folder / "vectors").save("sae", tensors_of(sae), {"site": SITE})
    asked = {"features": {"sae": "sae", "top": 16}}
    clamp = {"site": SITE, "op": "clamp", "sae": "sae", "feature": 3, "scale": 50}
    before = one.run(asked).json()["interp"]["features"][0]
    after = one.run(asked | {"edit": [clamp]}).json()["interp"]["features"][0]
    values = {each["feature"]: each["value"] for each in after["top"]}
    assert values[3] == pytest.approx(50, rel=1e-3)
    assert {each["feature"]: each["value"] for each in before["top"]}.get(3) != values[3]
