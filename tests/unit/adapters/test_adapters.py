"""LoRA adapters: what is refused and why, which place an adapter gets, and how they are kept."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.matrices import Adapter, LoraPair
from engine.adapters.reading import open_adapter
from engine.architectures.base import ExpertsConfig
from engine.core.errors import ConflictError, EngineError, NotFoundError
from engine.core.interfaces.request import (
    AdapterRef,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    SamplingParams,
)
from engine.core.store import adapter_store
from engine.runtime.groups.adapter_slots import AdapterSlots
from engine.runtime.model_runner import AdapterRunner
from engine.runtime.requests.admission import namespace_of
from tests.support.files.gguf_files import tiny_config
from tests.support.files.lora_files import PREFIX, peft_folder
from tests.support.files.safetensors_files import file_bytes

CONFIG = tiny_config("llama")
Q = "model.layers.0.self_attn.q_proj"
Q_SHAPE = (CONFIG.num_heads * CONFIG.head_dim, CONFIG.hidden_size)
SHAPES = {Q: Q_SHAPE}


def refused(folder: Path, says: str, max_rank: int = 64) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        open_adapter(folder, CONFIG, max_rank)
    assert "\n" not in caught.value.message


def test_a_peft_folder_is_read_with_its_scale(tmp_path: Path) -> None:
    plain = open_adapter(peft_folder(tmp_path / "a", SHAPES, rank=4), CONFIG)
    pair = plain.pairs["layers.0.attn.q.weight"]
    changes = {"use_rslora": True, "alpha_pattern": {"self_attn.q_proj": 4}}
    scaled = open_adapter(peft_folder(tmp_path / "b", SHAPES, rank=4, config=changes), CONFIG)
    other = scaled.pairs["layers.0.attn.q.weight"]
    assert pair.rank == 4 and (pair.b.shape[0], pair.a.shape[1]) == Q_SHAPE
    # alpha / rank = 8 / 4, and alpha / sqrt(rank) = 4 / 2
    np.testing.assert_allclose(other.b, pair.b)
    assert plain.key == scaled.key
    lower = {"alpha_pattern": {"q_proj": 1}}
    third = open_adapter(peft_folder(tmp_path / "c", SHAPES, rank=4, config=lower), CONFIG)
    np.testing.assert_allclose(third.pairs["layers.0.attn.q.weight"].b * 8, pair.b)
    assert third.key != plain.key


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"bias": "all"}, "bias all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["k_proj"]}, "target_modules does not name"),
        ({"target_modules": r".*\.v_proj"}, "target_modules does not name"),
        ({"target_modules": "("}, "not valid"),
        ({"layers_to_transform": [1]}, "target_modules does not name"),
        ({"r": 5}, "states rank 5"),
        ({"r": "4"}, "'r'"),
        ({"lora_alpha": 1e400}, "finite|lora_alpha"),
        ({"rank_pattern": {"q_proj": "x"}}, "numbers"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
    ],
)
def test_peft_settings_that_change_the_arithmetic_are_refused(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    refused(peft_folder(tmp_path / "a", SHAPES, config=config), says)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({Q: (Q_SHAPE[0], Q_SHAPE[1] + 1)}, "another base model"),
        ({"model.layers.99.self_attn.q_proj": Q_SHAPE}, "another base model"),
        ({"model.layers.0.self_attn.x_proj": Q_SHAPE}, "another base model"),
    ],
)
def test_an_adapter_for_another_base_model_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, int]], says: str
) -> None:
    refused(peft_folder(tmp_path / "a", shapes), says)


def test_damaged_adapter_files_are_refused(tmp_path: Path) -> None:
    refused(peft_folder(tmp_path / "rank", SHAPES, rank=9), "above the limit of 8", max_rank=8)
    folder = peft_folder(tmp_path / "nan", SHAPES)
    a = np.full((4, Q_SHAPE[1]), np.nan, np.float32)
    b = np.zeros((Q_SHAPE[0], 4), np.float32)
    names = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(file_bytes({names[0]: a, names[1]: b}))
    refused(folder, "NaN")
    weights.write_bytes(file_bytes({names[1]: b}))
    refused(folder, "not both matrices")
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02}q\x00.")
    refused(folder, "pickle")
    (folder / "adapter_model.bin").unlink()
    refused(folder, "holds no adapter_model.safetensors")
    refused(tmp_path / "nothing", "there is no adapter")
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04")
    refused(tmp_path / "x.pt", "can carry code")


def test_adapters_on_experts_are_refused_by_name(tmp_path: Path) -> None:
    experts = ExpertsConfig(count=4, per_token=2, size=24)
    config = replace(tiny_config("llama"), family="qwen3_moe", experts=experts)
    module = "model.layers.0.mlp.experts.1.gate_proj"
    folder = peft_folder(tmp_path / "a", {module: (24, config.hidden_size)})
    with pytest.raises(EngineError, match="experts"):
        open_adapter(folder, config)


def test_each_adapter_and_salt_has_its_own_cache_namespace() -> None:
    def name(salt: str, key: str | None) -> str:
        ref = None if key is None else AdapterRef(key, "/p")
        return namespace_of(
            GenerateRequest(
                request_id="a", prompt=(1,), params=SamplingParams(), salt=salt, adapter=ref
            )
        )

    assert len({name("s", None), name("s", "k"), name("s", "l"), name("t", "k")}) == 4
    assert name("s", "k") == name("s", "k")


class Places:
    """`AdapterSlots` of two places over a runner that only notes what it is given."""

    def __init__(self, num_places: int = 2, max_host_bytes: int = 10**9) -> None:
        self.reads: list[str] = []
        self.set: list[tuple[int, str]] = []
        self.places = AdapterSlots(self, self.read, num_places, max_host_bytes)

    def read(self, path: Path) -> Adapter:
        self.reads.append(path.name)
        if path.name.startswith("bad"):
            raise NotFoundError("there is no adapter")
        values = np.full((1, 2), float(ord(path.name[0])), np.float32)
        return Adapter({path.name: LoraPair(values, values.T.copy())})

    def pack_adapter(self, adapter: Adapter) -> Adapter:
        return adapter

    def set_adapter(self, number: int, packed: Adapter) -> None:
        self.set.append((number, next(iter(packed.pairs))))

    def load(self, name: str) -> AdapterRef:
        replies: list[ControlReply] = []
        self.places.control(Control(1, "load_adapter", f"/x/{name}"))
        while not replies:
            time.sleep(0.001)
            self.places.reply(replies.append)
        assert replies[0].ok, replies[0].message
        return AdapterRef(json.loads(replies[0].message)["key"], f"/x/{name}")

    def place(self, ref: AdapterRef) -> int | None:
        self.places.begin_pass()
        return self.places.place(ref)


def test_the_least_recently_used_adapter_slot_is_reused() -> None:
    test = Places()
    a, b, c = (test.load(name) for name in "abc")
    assert (test.place(a), test.place(b), test.place(a)) == (1, 2, 1)
    assert test.place(c) == 2  # b was used longest ago
    test.places.used = {"a": 1, "b": 2}
    assert test.place(b) is None
    assert test.place(a) == 1
    test.places.used = {"a": 1}
    assert test.place(b) == 2
    assert test.set == [(1, "a"), (2, "b"), (2, "c"), (2, "b")]
    assert test.reads == ["a", "b", "c"]


def test_an_adapter_slot_that_failed_to_load_holds_no_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = Places(num_places=1)
    a, b = test.load("a"), test.load("b")
    assert test.place(a) == 1
    with monkeypatch.context() as patch:
        patch.setattr(test, "set_adapter", lambda number, packed: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            test.place(b)
    assert test.place(a) == 1
    assert test.set == [(1, "a"), (1, "a")], "it is copied again"


def test_a_request_waiting_for_an_adapter_slot_is_not_overtaken_forever() -> None:
    test = Places(num_places=1)
    a, b = test.load("a"), test.load("b")
    assert test.place(a) == 1
    test.places.used = {"a": 1}
    test.places.begin_pass()
    assert test.places.place(b) is None
    assert test.places.place(a) is None  # it came later, so it waits until b had its turn
    test.places.used = {}
    test.places.begin_pass()
    assert test.places.place(b) == 1


def test_host_memory_for_adapters_is_bounded_and_evicted_ones_are_read_again() -> None:
    test = Places(num_places=1, max_host_bytes=20)
    a, b = test.load("a"), test.load("b")
    assert test.place(b) == 1
    while test.place(a) is None:
        time.sleep(0.001)
    assert test.reads == ["a", "b", "a"]


def test_an_adapter_loaded_for_an_aborted_request_counts_towards_host_memory() -> None:
    """The engine loop does not go on to look for it, and host memory stays bounded."""
    test = Places(num_places=1, max_host_bytes=20)
    test.places._load("/x/a").result()  # as for a request that has to wait, and does not
    assert not test.places.is_loading
    test.load("b")
    assert not test.places._loading and len(test.places._host) == 1


def test_an_adapter_whose_files_changed_is_refused() -> None:
    test = Places()
    with pytest.raises(EngineError, match="changed"):
        while test.place(AdapterRef("other", "/x/a")) is None:
            time.sleep(0.001)
    replies: list[ControlReply] = []
    test.places.control(Control(7, "load_adapter", "/x/bad"))
    while not replies:
        time.sleep(0.001)
        test.places.reply(replies.append)
    assert (replies[0].control_id, replies[0].ok) == (7, False)
    assert not test.places.is_loading


def test_adapter_files_are_hashed_again_only_if_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, file, hashed = Places(), tmp_path / "a", []
    before = Adapter.key.fget
    assert before is not None
    monkeypatch.setattr(Adapter, "key", property(lambda self: hashed.append(1) or before(self)))
    file.write_bytes(b"1")
    first = test.places._read_and_pack(str(file)).facts
    assert test.places._read_and_pack(str(file)).facts == first and len(hashed) == 1
    file.write_bytes(b"22")
    assert test.places._read_and_pack(str(file)).facts == first and len(hashed) == 2


def test_stored_adapters_are_listed_by_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "store"))
    source = peft_folder(tmp_path / "a", SHAPES)
    kept = adapter_store.keep_adapter("ft:base:x:1", source, "base")
    assert adapter_store.kept_adapters("base") == {"ft:base:x:1": kept}
    assert adapter_store.kept_adapters("other") == {}
    assert open_adapter(kept, CONFIG).key == open_adapter(source, CONFIG).key
    with pytest.raises(ConflictError):
        adapter_store.keep_adapter("ft:base:x:1", source, "base")
    adapter_store.remove_adapter("ft:base:x:1")
    assert adapter_store.kept_adapters() == {} and not kept.exists()
    with pytest.raises(NotFoundError):
        adapter_store.remove_adapter("ft:base:x:1")


def test_runners_without_adapter_support_refuse_adapters() -> None:
    from engine.tinygrad.execution.runner import TinygradRunner
    from tests.support.toy_engine.engine import ToyEngine

    assert not hasattr(TinygradRunner, "set_adapter")
    engine = ToyEngine(num_blocks=16, block_size=4, max_slots=2)
    assert not isinstance(engine.runner, AdapterRunner)
    replies: list[Any] = []
    engine.channel.send = replies.append  # type: ignore[method-assign]
    engine.channel.inbox.append(Control(1, "load_adapter", "/x"))
    engine.turn()
    told = [each for each in replies if isinstance(each, ControlReply)]
    assert not told[0].ok and "need native, torch or jax" in told[0].message
    ref = AdapterRef("k", "/x")
    engine.channel.inbox.append(
        GenerateRequest(request_id="a", prompt=(1,), params=SamplingParams(), adapter=ref)
    )
    engine.turn()
    (deltas,) = [each for each in replies if isinstance(each, Deltas)]
    assert "no LoRA adapters" in str(deltas.deltas[0].error_message)
