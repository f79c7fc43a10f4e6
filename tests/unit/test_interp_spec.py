"""The `interp` object: what it may be, and what it becomes for the engine."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.backends.custom.runtime.interp.steps import make_probe
from engine.core.config_storage import InterpSettings
from engine.core.errors import EngineError, InvalidRequestError, NotFoundError, PayloadTooLargeError
from engine.core.interfaces.interp import Attribution, InterpRequest, Lens
from engine.core.interfaces.request import AdapterRef, GenerateRequest, SamplingParams
from engine.core.interp.features import encode
from engine.core.interp.resolving import resolved
from engine.core.interp.results import Result
from engine.core.interp.spec import parse_interp
from engine.core.interp.vectors import VectorStore
from engine.core.tensor_file import StoredTensor, pack_tensors, unpack_tensors
from engine.library.steering import read_vectors, tensors_of, write_gguf
from engine.servers.interp.stored import ResultStore

SITE = "blocks.1.hook_resid_post"


def result(values: np.ndarray, positions: list[int], site: str = SITE) -> bytes:
    facts = {
        "num_prompt": 4,
        "token_ids": [1, 2, 3, 4, 5],
        "captures": [{"site": site, "positions": positions, "tensor": "0"}],
    }
    tensor = StoredTensor("0", "F32", values.shape, values.astype(np.float32).tobytes())
    return pack_tensors([tensor], {"interp": json.dumps(facts)})


def no_result(_: str) -> Result:
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
        ({"lens": {"top": True}}, "interp.lens.top"),
        ({"code": "import os"}, "interp.code"),
    ],
)
def test_a_bad_object_is_refused_by_the_path_of_its_fault(raw: object, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_interp(raw)
    assert (caught.value.param or "").startswith(path)


def test_names_become_vectors_and_unit_directions(tmp_path: Path) -> None:
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
    assert [each.name for each in store.names()] == ["calm"]
    for name in ("angry", "../calm", "calm/../../x"):
        edit = {"edit": [{"site": SITE, "op": "add", "vector": name}]}
        with pytest.raises(EngineError):
            resolved(parse_interp(edit), store, no_result, 100)
    other = {"edit": [{"site": "hook_embed", "op": "add", "vector": "calm"}]}
    with pytest.raises(InvalidRequestError, match="but for: blocks.1"):
        resolved(parse_interp(other), store, no_result, 100)


def test_a_patch_takes_rows_of_an_earlier_result(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    earlier = Result(result(values, [1, 2, 3]))
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


def test_results_end_with_their_time_and_belong_to_their_tenant() -> None:
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
def test_what_needs_the_base_models_head_is_refused_for_an_adapter(
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
        make_probe(request, None, 1, ())
