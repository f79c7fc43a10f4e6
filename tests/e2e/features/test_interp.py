"""Activations of the default model as users read and change them: over HTTP and in Python."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.core.errors import NotFoundError
from engine.core.interp.results import InterpResult
from engine.core.interp.vectors import VectorStore
from engine.core.key_file import add_key
from engine.core.tensor_file import unpack_tensors
from engine.library.interp import Remote
from engine.library.steering import tensors_of, train
from tests.conftest import DEFAULT_MODEL
from tests.support.servers.served import ServedEngine, serve

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


def test_interp_results_over_http_name_site_and_positions(clients: Any) -> None:
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


def test_steering_changes_one_chat_and_not_its_batch_neighbour(clients: Any) -> None:
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
def test_invalid_interp_requests_are_refused_with_an_explanation(
    clients: Any, interp: Any, status: int
) -> None:
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


@pytest.fixture(scope="module")
def plain(default_model: Path) -> Iterator[tuple[httpx.Client, ServedEngine]]:
    """A server with the limits that it has by default, whose connections are held by a
    process of their own.
    """
    with serve(DEFAULT_MODEL, env={"LLM_ENGINE_SERVER__FRONTENDS": "2"}) as served:
        yield httpx.Client(base_url=served.url, timeout=200), served


LONG = "The capital of France is Paris and " * 190  # about 1,500 tokens
HOSTILE: dict[str, dict[str, Any]] = {
    "attention": {"attention": {"layers": list(range(30)), "positions": "all"}},
    "same layers": {"attention": {"layers": [3] * 1000, "heads": [1] * 1000, "positions": "all"}},
    "lens": {"lens": {"layers": "all", "top": 100, "positions": [-1, -2]}},
    "large lens": {
        "lens": {"layers": "all", "top": 100, "positions": "all"},
        "capture": [{"site": SITE}] * 20,
    },
    "same captures": {"capture": [{"site": SITE}] * 4096},
    "patch": {
        "edit": [{"site": SITE, "op": "patch", "from": {"id": "ID", "positions": [0] * 32_000}}]
    },
    "vectors": {"edit": [{"site": SITE, "op": "add", "vector": [0.5] * 576}] * 20},
    "large result": {"capture": [{"site": f"blocks.{n}.hook_resid_post"} for n in range(15)]},
}
# Those whose repetitions count once, or that fit. They are sent with a shorter prompt.
ANSWERED = ("same layers", "lens", "vectors", "large result")


def test_oversized_interp_requests_do_not_end_the_engine(plain: Any) -> None:
    http, served = plain
    pid = served.engine_pid()
    stored = {"capture": [{"site": SITE, "positions": [0]}], "store": True}
    made = http.post("/v1/interp/run", json={"prompt": PROMPT, "interp": stored}).json()
    for name, interp in HOSTILE.items():
        for edit in interp.get("edit", []):
            if "from" in edit:
                edit["from"]["id"] = made["interp"]["id"]
        is_small = name in ANSWERED
        prompt = PROMPT * 40 if is_small else LONG
        answer = http.post("/v1/interp/run", json={"prompt": prompt, "interp": interp})
        assert answer.status_code == (200 if is_small else 400), (name, answer.text[:300])
        if not is_small:
            assert "bytes" in answer.text and "interp.max_capture_mb" in answer.text, name
        told = answer.json().get("interp")
        if told is not None and not told["inline"]:
            data = http.get(f"/v1/interp/results/{told['id']}").content
            assert len(data) == told["bytes"] and InterpResult(data).facts["num_prompt"] > 100, name
        assert served.engine_pid() == pid, name
    assert http.get("/health").json()["status"] == "healthy"


def test_captures_survive_the_death_of_their_engine(plain: Any) -> None:
    """The last layer, before and after the engine was killed in the middle of the answer."""
    http, served = plain
    last = ("blocks.29.hook_resid_post", "blocks.29.hook_mlp_out", "ln_final.hook_normalized")
    body = {
        "prompt": PROMPT,
        "max_tokens": 60,
        "temperature": 0.0,
        "ignore_eos": True,
        "interp": {"capture": [{"site": each} for each in (*last, SITE)], "store": True},
    }
    expected = http.post("/v1/completions", json=body).json()
    before = served.metric("engine_generated_tokens_total")
    found: dict[str, Any] = {}
    asking = threading.Thread(
        target=lambda: found.update(http.post("/v1/completions", json=body).json())
    )
    asking.start()
    served.wait_until(lambda: served.metric("engine_generated_tokens_total") > before + 5)
    os.kill(served.engine_pid(), signal.SIGKILL)
    asking.join()
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    ids = (expected["interp"]["id"], found["interp"]["id"])
    one, two = (InterpResult(http.get(f"/v1/interp/results/{each}").content) for each in ids)
    assert one.facts == two.facts
    for name, tensor in one.tensors.items():
        assert tensor.data == two.tensors[name].data, name
        rows = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        assert np.abs(rows).max(axis=1).min() > 0, "a position without values"
