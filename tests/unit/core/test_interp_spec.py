"""The `interp` object: what it may be, and what it becomes for the engine."""

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from engine.core.config_storage import InterpSettings
from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    RateLimitError,
)
from engine.core.interfaces.interp import Attribution, InterpRequest, Lens
from engine.core.interfaces.request import (
    AdapterRef,
    GenerateRequest,
    ImageInput,
    SamplingParams,
)
from engine.core.interp import vectors as vectors_module
from engine.core.interp.features import encode, top_features
from engine.core.interp.resolving import resolved
from engine.core.interp.results import InterpResult
from engine.core.interp.spec import parse_interp
from engine.core.interp.vectors import VectorStore
from engine.core.observability.metrics import Metrics
from engine.core.tensor_file import FileTensor, StoredTensor, pack_tensors, unpack_tensors
from engine.library.steering import read_vectors, tensors_of, write_gguf
from engine.runtime.interp.steps import make_probe
from engine.servers.app import create_app
from engine.servers.serving.interp_results import MAX_RESULTS, SHARES, ResultStore
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

SITE = "blocks.1.hook_resid_post"


def result(values: np.ndarray, positions: list[int], site: str = SITE) -> bytes:
    facts = {
        "num_prompt": 4,
        "token_ids": [1, 2, 3, 4, 5],
        "captures": [{"site": site, "positions": positions, "tensor": "0"}],
    }
    tensor = StoredTensor("0", "F32", values.shape, values.astype(np.float32).tobytes())
    return pack_tensors([tensor], {"interp": json.dumps(facts)})


def no_result(_: str) -> InterpResult:
    raise NotFoundError("none")


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ([], "interp"),
        ({"capture": [{"site": 3}]}, "interp.capture[0].site"),
        ({"capture": [{"site": "x", "positions": "some"}]}, "interp.capture[0].positions"),
        ({"edit": [{"site": "x", "op": "exec"}]}, "interp.edit[0].op"),
        ({"edit": [{"site": "x", "op": "add"}]}, "interp.edit[0]"),
        ({"edit": [{"site": "x", "op": "add", "vector": [float("nan")]}]}, "interp.edit[0].vector"),
        ({"edit": [{"site": "x", "op": "add", "vector": [1e400]}]}, "interp.edit[0].vector"),
        ({"edit": [{"site": "x", "op": "patch"}]}, "interp.edit[0]"),
        ({"edit": [{"site": "x", "op": "clamp", "sae": "s"}]}, "interp.edit[0]"),
        ({"edit": [{"site": "x", "op": "scale", "vector": [1.0]}]}, "interp.edit[0]"),
        ({"lens": {"top": 0}}, "interp.lens.top"),
        ({"lens": {"layers": []}}, "interp.lens.layers"),
        ({"attention": {"layers": []}}, "interp.attention.layers"),
        ({"attention": {"layers": [0], "heads": []}}, "interp.attention.heads"),
        ({"attribution": {"target": "a" * 300}}, "interp.attribution.target"),
        ({"lens": {"top": True}}, "interp.lens.top"),
        ({"code": "import os"}, "interp.code"),
    ],
)
def test_an_invalid_interp_object_is_refused_with_the_path_of_the_error(
    raw: object, path: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_interp(raw)
    assert (caught.value.param or "").startswith(path)


def test_edits_resolve_stored_vectors_and_unit_directions(tmp_path: Path) -> None:
    store = VectorStore(tmp_path)
    vector = np.array([3.0, 4.0], np.float32)
    store.save("calm", tensors_of({SITE: vector}), {})
    raw = {
        "edit": [
            {"site": SITE, "op": "add", "vector": "calm", "scale": 2},
            {"site": SITE, "op": "project_out", "vector": "calm"},
            {"site": SITE, "op": "ablate", "positions": [-1], "phase": "prompt"},
        ]
    }
    added, projected, ablated = resolved(parse_interp(raw), store, no_result, 100).edits
    assert added.scale == 2
    np.testing.assert_array_equal(np.frombuffer(added.vectors[0], np.float32), vector)
    np.testing.assert_allclose(np.frombuffer(projected.vectors[0], np.float32), [0.6, 0.8])
    assert (ablated.kind, ablated.scale, ablated.span.positions) == ("scale", 0.0, (-1,))
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    assert [each.name for each in store.names()] == ["calm"]
    for name in ("angry", "../calm", "calm/../../x", "\u540d" * 128):
        edit = {"edit": [{"site": SITE, "op": "add", "vector": name}]}
        with pytest.raises(EngineError):
            resolved(parse_interp(edit), store, no_result, 100)
    other = {"edit": [{"site": "hook_embed", "op": "add", "vector": "calm"}]}
    with pytest.raises(InvalidRequestError, match="but for: blocks.1"):
        resolved(parse_interp(other), store, no_result, 100)


def test_a_patch_uses_rows_of_a_stored_result(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    earlier = InterpResult(result(values, [1, 2, 3]))
    raw = {
        "edit": [
            {
                "site": SITE,
                "op": "patch",
                "from": {"id": "r", "positions": [3, -3]},
                "positions": [0, 2],
            }
        ]
    }
    (edit,) = resolved(parse_interp(raw), VectorStore(tmp_path), lambda _: earlier, 100).edits
    rows = [np.frombuffer(each, np.float32).tolist() for each in edit.vectors]
    assert (rows, edit.span.positions) == ([[4.0, 5.0], [0.0, 1.0]], (0, 2))
    raw["edit"][0]["from"]["positions"] = [0, 1]  # type: ignore[index]
    with pytest.raises(InvalidRequestError, match="no values"):
        resolved(parse_interp(raw), VectorStore(tmp_path), lambda _: earlier, 100)


def test_a_patch_finds_its_positions_in_any_capture_of_the_site() -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    earlier = InterpResult(result(values, [1, 2, 3]))
    first = earlier.facts["captures"][0]
    earlier.facts["captures"].insert(0, first | {"positions": [0], "tensor": "0"})
    assert [np.frombuffer(row, np.float32).tolist() for row in earlier.rows(SITE, [2])[1]] == [
        [2.0, 3.0]
    ]


SAE = {"W_enc": (4, 3), "W_dec": (3, 4), "b_enc": (3,), "b_dec": (4,), "threshold": (3,)}


def test_gradients_beside_images_are_refused() -> None:
    """They would be those of the tokens that stand for the image."""
    interp = InterpRequest(attribution=Attribution(method="input_x_gradient"))
    image = ImageInput(0, 1, 1, 1, b"abc")
    request = GenerateRequest(
        request_id="r", prompt=(1, 2), params=SamplingParams(), interp=interp, images=(image,)
    )
    with pytest.raises(InvalidRequestError, match="this prompt has images"):
        make_probe(request, request.interp, None, 1, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"W_enc": shape} for shape in [(), (12,), (4, 0), (3, 4), (1, 4, 3)]),
        *({"W_dec": (4, 3)}, {"b_enc": (4,)}, {"b_dec": (3,)}, {"threshold": (2,)}),
    ],
)
@pytest.mark.parametrize("kind", ["clamp", "features"])
def test_an_autoencoder_whose_shapes_disagree_is_refused(
    tmp_path: Path, wrong: dict[str, tuple[int, ...]], kind: str
) -> None:
    store = VectorStore(tmp_path)
    shapes = SAE | wrong
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    store.save("sae", tensors_of(tensors), {"site": SITE})
    clamp = {"edit": [{"site": SITE, "op": "clamp", "sae": "sae", "feature": 0}]}
    raw = clamp if kind == "clamp" else {"features": {"sae": "sae", "site": SITE}}
    with pytest.raises(InvalidRequestError, match="is no sparse autoencoder"):
        resolved(parse_interp(raw), store, no_result, 10_000)


def test_autoencoder_features_come_only_from_their_own_positions(tmp_path: Path) -> None:
    """Another capture of the site does not stand for theirs."""
    store = VectorStore(tmp_path)
    store.save("sae", tensors_of({"W_enc": np.eye(2, dtype=np.float32)}), {"site": SITE})
    spec = parse_interp({"features": {"sae": "sae"}}).features
    assert spec is not None
    found = InterpResult(result(np.array([[7.0, 8.0]]), [3]))
    found.facts["captures"].insert(0, {"site": SITE, "positions": [0], "tensor": "0"})
    (only,) = top_features(spec, store, found)
    assert (only["position"], only["top"][0]) == (3, {"feature": 1, "value": 8.0})
    assert top_features(spec, store, InterpResult(result(np.zeros((0, 2)), []))) == []


def test_clamping_a_feature_reads_the_encoder_and_writes_the_decoder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sae = {
        "W_enc": rng.normal(size=(4, 3)).astype(np.float32),
        "W_dec": rng.normal(size=(3, 4)).astype(np.float32),
        "b_enc": rng.normal(size=3).astype(np.float32),
        "b_dec": rng.normal(size=4).astype(np.float32),
        "threshold": np.array([0.1, 0.2, 0.3], np.float32),
    }
    store = VectorStore(tmp_path)
    store.save("sae", tensors_of(sae), {"site": SITE})
    raw = {"edit": [{"site": SITE, "op": "clamp", "sae": "sae", "feature": 2, "scale": 5}]}
    (edit,) = resolved(parse_interp(raw), store, no_result, 100).edits
    x = rng.normal(size=(6, 4)).astype(np.float32)
    before = x @ np.frombuffer(edit.vectors[0], np.float32) + edit.bias
    feature = np.where(before > edit.threshold, before, 0)
    tensors, _ = store.load("sae")
    np.testing.assert_allclose(feature, encode(tensors, x)[:, 2], atol=1e-5)
    np.testing.assert_array_equal(np.frombuffer(edit.vectors[1], np.float32), sae["W_dec"][2])


def test_control_vectors_survive_gguf(tmp_path: Path) -> None:
    vectors = {f"blocks.{n}.hook_resid_post": np.full(8, n, np.float32) for n in (1, 2, 5)}
    write_gguf(tmp_path / "v.gguf", vectors, "llama")
    found, facts = read_vectors(tmp_path / "v.gguf")
    assert facts["model_hint"] == "llama"
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in vectors.items()
    }


def test_stored_results_expire_and_belong_to_their_tenant() -> None:
    store = ResultStore(InterpSettings(max_stored_mb=1, result_ttl_s=1e-9))
    store.put("a", "me", b"x")
    with pytest.raises(NotFoundError):
        store.get("a", "me")
    store = ResultStore(InterpSettings(max_stored_mb=1))
    store.put("a", "me", b"x")
    with pytest.raises(NotFoundError):
        store.get("a", "you")
    with pytest.raises(NotFoundError):
        store.delete("a", "you")
    assert store.get("a", "me") == b"x"
    with pytest.raises(PayloadTooLargeError):
        store.put("b", "me", bytes(2**20 + 1))
    store.put("b", "you", bytes(2**20))
    store.put("c", "me", bytes(2**20))  # "a" has to go, what others stored stays
    assert store.num_bytes == 2 * 2**20
    assert store.get("b", "you") == bytes(2**20)
    with pytest.raises(NotFoundError):
        store.get("a", "me")


def test_stored_results_are_bounded_and_never_evicted_for_another_tenant() -> None:
    store = ResultStore(InterpSettings(max_stored_mb=1))
    for n in range(SHARES):
        store.put(f"{n}", f"tenant {n}", bytes(2**20))
    with pytest.raises(RateLimitError):
        store.put("more", "late", b"x")
    store.put("again", "tenant 0", bytes(2**20))  # in the place of its own
    assert store.num_bytes == SHARES * 2**20
    assert all(store.get(f"{n}", f"tenant {n}") for n in range(1, SHARES))
    store.delete("1", "tenant 1")
    store.put("more", "late", b"x")
    for n in range(MAX_RESULTS + 5):  # small ones count too
        store.put(f"small {n}", "late", b"")
    assert store.num_bytes == 3 * 2**20


@pytest.mark.parametrize(
    "raw",
    [
        {"edit": [{"site": SITE, "op": "add", "vector": [1.0] * 2**19}] * 3},
        {"capture": [{"site": SITE, "positions": [0] * 40_000}] * 2},
        {"edit": [{"op": "patch", "from": {"positions": [0] * 40_000}}] * 2, "lens": {}},
    ],
)
def test_all_lists_of_an_interp_object_are_bounded_together(raw: dict) -> None:
    with pytest.raises(InvalidRequestError, match="together"):
        parse_interp(raw)


def test_stored_vectors_are_size_checked_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = VectorStore(tmp_path)
    store.save("v", tensors_of({SITE: np.ones(1000, np.float32)}), {})
    monkeypatch.setattr(FileTensor, "read", lambda *_: pytest.fail("it was read"))
    assert [each.size for each in store.names()] == [1000]
    raw = {"edit": [{"site": SITE, "op": "add", "vector": "v"}]}
    with pytest.raises(InvalidRequestError, match=r"8,000 bytes.*interp.max_capture_mb"):
        resolved(parse_interp(raw), store, no_result, 7999)


async def test_vector_files_are_not_read_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever route or request names a vector."""
    VectorStore(tmp_path).save("v", tensors_of({SITE: np.ones(4, np.float32)}), {})
    real, read = vectors_module.open_tensors, []

    def off_the_loop(path: Path) -> object:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        read.append(path)
        return real(path)

    monkeypatch.setattr(vectors_module, "open_tensors", off_the_loop)
    settings = make_settings(interp={"vectors_dir": str(tmp_path)}, storage={"path": tmp_path})
    app = create_app(settings, FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = await client.get("/v1/interp/vectors")
        assert found.status_code == 200 and found.json()["data"][0]["name"] == "v"
        edit = {"site": SITE, "op": "add", "vector": "v"}
        features = {"sae": "v", "site": SITE}
        for interp in ({"edit": [edit]}, {"lens": {"tuned": "v"}}, {"features": features}):
            body = {"prompt": "x", "interp": interp}
            answer = await client.post("/v1/interp/run", json=body)
            assert answer.status_code in (200, 400), answer.text
    assert len(read) >= 3


@pytest.mark.parametrize(
    "data",
    [b"", b"12345678", b"\xff" * 64, pack_tensors([], {})[:-1], (5).to_bytes(8, "little") + b"nul"],
)
def test_a_broken_tensor_file_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        unpack_tensors(data)


def test_a_tensor_outside_its_file_is_refused() -> None:
    whole = pack_tensors([StoredTensor("x", "F32", (2,), bytes(8))], {})
    assert unpack_tensors(whole)[0][0].shape == (2,)
    for old, new in ((b"[0, 8]", b"[0, 9]"), (b"[2]", b"[3]"), (b'"F32"', b'"F99"')):
        with pytest.raises(InvalidRequestError):
            unpack_tensors(whole.replace(old, new))


GRADIENT = {"attribution": Attribution(1, -1, "input_x_gradient")}


@pytest.mark.parametrize(
    ("interp", "changes_head"),
    [({"lens": Lens((0,), 1)}, True), ({"attribution": Attribution(1)}, True), (GRADIENT, False)],
)
def test_lens_and_attribution_are_refused_for_adapters_that_change_the_head(
    interp: dict, changes_head: bool
) -> None:
    request = GenerateRequest(
        request_id="a",
        prompt=(1,),
        params=SamplingParams(),
        adapter=AdapterRef("key", "/path", changes_head),
        interp=InterpRequest(**interp),
    )
    with pytest.raises(InvalidRequestError, match="send the request to the base model"):
        make_probe(request, request.interp, None, 1, ())
