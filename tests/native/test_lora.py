"""LoRA adapters beside quantized weights, in every instruction set. They have 8 bits, too."""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from engine.adapters.matrices import Adapter, LoraPair
from engine.adapters.reading import open_adapter
from engine.ir.plan import Machine
from engine.native.execution import adapter_packing as packing
from engine.native.execution import build
from engine.runtime.interp.taps import CAPTURE, EXTRA_COLUMNS, TapInputs
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import ModelSource, open_model
from engine.weights.quantize import quantize
from tests.parity.runner_driver import RunnerDriver
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf
from tests.support.files.lora_files import peft_folder

SHAPES = {
    # Of the fused weights q, k and v only the last one: others may tip the softmax over. What they
    # add to queries and keys is compared in `test_int8_lora_products_stay_within_rounding_error`.
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
RANKS = (3, 16, 40)  # the last one has two groups of ranks
LAYERS = (1,)  # the last one, after which little is rounded
TEXTS = [[3, 7, 9, 4], [8, 8, 1], [5, 30, 31, 32, 33, 6], [2, 9]]
PLACES = [0, 1, 2, 3]
PROJECTIONS = {"q": 64, "k": 32, "v": 32}  # the fused weights, and their output channels


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSource]:
    config, path = tiny_config("llama"), tmp_path_factory.mktemp("base") / "tiny.gguf"
    stored = gguf_layout(config, random_weights(config))
    for name, values in stored.items():
        if values.ndim == 2:
            stored[name] = quantize("Q8_0", values).reshape(len(values), -1)
    write_gguf(path, config, stored)
    model = open_model(path)
    yield model
    model.close()


@pytest.fixture(scope="module")
def adapters(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for rank in RANKS:
        # One of them changes only some of the fused weights.
        names = [name for name in SHAPES if rank != 3 or name.split(".")[1][0] != "u"]
        shapes = {f"model.layers.{n}.{name}": SHAPES[name] for n in LAYERS for name in names}
        path = peft_folder(folder / str(rank), shapes, rank=rank, seed=rank, std=0.5)
        made.append(open_adapter(path, source.config))
    return made


def runner_for(source: ModelSource, adapters: list[Adapter]) -> Any:
    runner = build.build_runner(source, RunnerConfig("cpu", build.STORED, 16, 64, 8, 48, 2))
    for number, adapter in enumerate(adapters, start=1):
        runner.set_adapter(number, runner.pack_adapter(adapter))
    return runner


def in_floats(sites: tuple[packing.AdaptedMatmul, ...]) -> tuple[packing.AdaptedMatmul, ...]:
    return tuple(replace(site, numerics="f32") for site in sites)


def last_logits(runner: Any, rows: list[int], places: list[int]) -> np.ndarray:
    """The logits of the last token of some texts, which is a decode token."""
    driver = RunnerDriver(runner)
    tracks = [driver.add(TEXTS[row]) for row in rows]
    ids = np.array(places, np.int32)
    for track in tracks:
        track.num_prompt -= 1
    for counts in ([track.num_prompt for track in tracks], [1] * len(tracks)):
        work = list(zip(tracks, counts, strict=True))
        handle = runner.forward(replace(driver.inputs(work), adapter_ids=ids))
        for track, count in work:
            track.num_computed += count
    return runner.logits(handle, np.arange(len(rows), dtype=np.int32))


def test_int8_adapters_change_logits_like_float_adapters(
    isa: str,
    native: ModuleType,
    source: ModelSource,
    adapters: list[Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They change logits as those of floats do, and a row keeps its bits beside other adapters."""
    machine = Machine(2, isa, native.has_bf16(isa))
    monkeypatch.setattr(build, "machine_with", lambda _: machine)
    runner, sites_of = runner_for(source, adapters), packing.sites_of
    with monkeypatch.context() as patch:
        patch.setattr(packing, "sites_of", lambda *given: in_floats(sites_of(*given)))
        floats = runner_for(source, adapters)
    rows = list(range(len(TEXTS)))
    mixed, exact = (last_logits(each, rows, PLACES) for each in (runner, floats))
    plain = last_logits(runner, rows, [0] * 4)
    np.testing.assert_array_equal(mixed[0], plain[0])
    for row in rows[1:]:
        np.testing.assert_array_equal(mixed[row], last_logits(runner, [row], [PLACES[row]])[0])
        error = np.linalg.norm(mixed[row] - exact[row]) / np.linalg.norm(exact[row] - plain[row])
        assert error < 0.06, error
    same = last_logits(runner, rows, [2] * 4)  # other blocks of rows than above
    np.testing.assert_array_equal(same[2], mixed[2])
    runner.close()
    floats.close()


def captured(runner: Any, names: list[str], place: int) -> list[np.ndarray]:
    """The values of sites for a text of one token, which is a decode token."""
    numbers = {site.name: number for number, site in enumerate(runner.sites)}
    sites = np.array([numbers[name] for name in names], np.int32)
    widths = [runner.sites[site].width for site in sites]
    count = len(names)
    taps = TapInputs(
        sites,
        tokens=np.zeros(count, np.int32),
        kinds=np.full(count, CAPTURE, np.int32),
        rows=np.arange(count, dtype=np.int32),
        scales=np.ones(count, np.float32),
        vectors=np.zeros((1, max(widths) + EXTRA_COLUMNS), np.float32),
        num_captured=count,
        width=max(widths),
    )
    driver = RunnerDriver(runner)
    track = driver.add([7])
    track.num_prompt = 0
    inputs = replace(driver.inputs([(track, 1)]), adapter_ids=np.array([place], np.int32))
    rows = runner.forward(replace(inputs, taps=taps)).captured
    return [row[:width].copy() for row, width in zip(rows, widths, strict=True)]


def projections(rank: int, sizes: np.ndarray) -> Adapter:
    """An adapter of q, k and v in the first layer. Rank i of A is divided by `sizes[i]`, and that
    of B multiplied, so that all sizes give the same product.
    """
    rng, pairs = np.random.default_rng(rank), {}
    for name, rows in PROJECTIONS.items():
        a = rng.normal(0, 0.3, (rank, 64)).astype(np.float32)
        b = rng.normal(0, 0.3, (rows, rank)).astype(np.float32)
        pairs[f"layers.0.attn.{name}.weight"] = LoraPair(a / sizes[:, None], b * sizes)
    return Adapter(pairs)


@pytest.mark.parametrize("rank", RANKS)
def test_int8_lora_products_stay_within_rounding_error(
    isa: str, native: ModuleType, source: ModelSource, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an adapter adds to queries, keys and values is B (A x) within the error of 8 bits,
    however large A and each of its ranks is.
    """
    machine = Machine(2, isa, native.has_bf16(isa))
    monkeypatch.setattr(build, "machine_with", lambda _: machine)
    ones = np.ones(rank, np.float32)
    sizes = [ones, ones * 2**20, ones / 2**20, np.exp2(np.arange(rank) % 24).astype(np.float32)]
    adapters = [projections(rank, each) for each in sizes]
    runner = runner_for(source, adapters)
    names = [f"blocks.0.attn.hook_{name}" for name in PROJECTIONS]
    (stream,) = captured(runner, ["blocks.0.hook_resid_pre"], 0)
    norm = random_weights(source.config)["layers.0.attn_norm.weight"]
    x = norm * stream / np.sqrt(np.mean(stream**2) + source.config.norm_eps)
    plain = captured(runner, names, 0)
    told = [captured(runner, names, place) for place in range(1, len(adapters) + 1)]
    for index, pair in enumerate(adapters[0].pairs.values()):
        exact = pair.b @ (pair.a @ x)
        error = np.linalg.norm(told[0][index] - plain[index] - exact) / np.linalg.norm(exact)
        assert error < 0.02, (names[index], error)
        for other in told[1:]:
            np.testing.assert_array_equal(other[index], told[0][index])
    runner.close()
