"""LoRA adapters against PEFT, in float32: adapted rows, base rows beside them, merged models."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.adapters.matrices import Adapter
from engine.adapters.reading import open_adapter
from engine.runtime.model_runner import ModelRunner, RunnerConfig
from engine.weights.model import ModelSource, open_model
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver, Track

FAMILIES = ("llama", "gpt2", "gemma2", "phi3")
FRAMEWORKS = ("native", "torch", "jax")
TOLERANCE = 1e-4
LENGTHS = (17, 9, 23, 5, 11)
# The second adapter has ranks and alphas of its own for some layers, and other target modules. The
# third one has embeddings and a head of its own.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"r": 5, "lora_alpha": 9},
    {"r": 3, "lora_alpha": 7, "use_rslora": True, "rank_pattern": {"1.*": 6}, "few": True},
    {"r": 4, "lora_alpha": 4, "few": True, "modules_to_save": ["embed_tokens", "wte", "lm_head"]},
)


@dataclass(frozen=True)
class Tuned:
    """A tiny model, its adapters, and the logits of some texts: of PEFT, and merged."""

    source: ModelSource
    adapters: list[Adapter]
    texts: list[list[int]]
    expected: list[list[np.ndarray]]  # for the base model, then each adapter: each text's logits
    merged: list[np.ndarray]  # of the first adapter


def linears(model: Any) -> list[str]:
    kinds = [name for name, each in model.named_modules() if type(each).__name__ in KINDS]
    return sorted({name.rpartition(".")[2] for name in kinds})


KINDS = ("Linear", "Conv1D", "Embedding")


@pytest.fixture(scope="module", params=FAMILIES)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Tuned]:
    import peft

    folder: Path = tmp_path_factory.mktemp("lora")
    model, path = tiny_models.save(request.param, folder)
    source = open_model(path)
    torch.manual_seed(3)
    texts = [torch.randint(3, tiny_models.VOCAB, (n,)).tolist() for n in LENGTHS]
    names = [name for name in linears(model) if name not in ("wpe",)]
    ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    expected = [_logits(model, texts)]
    adapters, merged = [], []
    for index, settings in enumerate(SETTINGS):
        few = [each for each in names if each[0] in "qdc"] if "few" in settings else names
        told = {key: value for key, value in settings.items() if key != "few"}
        if saved := [each for each in told.get("modules_to_save", ()) if each in ends]:
            told["modules_to_save"] = saved
            few = [each for each in few if each not in saved]
        config = peft.LoraConfig(target_modules=few, init_lora_weights=False, **told)
        tuned_model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, each in tuned_model.named_parameters():
                if "lora_" in name or ".modules_to_save." in name:
                    each.normal_(0, 0.15)
        tuned_model.save_pretrained(str(folder / f"adapter{index}"))
        adapters.append(open_adapter(folder / f"adapter{index}", source.config))
        expected.append(_logits(tuned_model, texts))
        if index == 0 and not model.config.tie_word_embeddings:
            tuned_model.merge_adapter()
            merged = _logits(tuned_model, texts)
            tuned_model.unmerge_adapter()
        model = tuned_model.unload()
    yield Tuned(source, adapters, texts, expected, merged)
    source.close()


def _logits(model: Any, texts: list[list[int]]) -> list[np.ndarray]:
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0, -1].numpy() for text in texts]


def runner_for(framework: str, source: ModelSource, adapters: list[Adapter]) -> Any:
    build = import_module(f"engine.{framework}.execution.build")
    config = RunnerConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        num_blocks=64,
        max_slots=16,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=None if framework == "jax" else 1,
    )
    runner = build.build_runner(source, config)
    for number, adapter in enumerate(adapters, start=1):
        runner.set_adapter(number, runner.pack_adapter(adapter))
    return runner


def logits_of(
    runner: ModelRunner, driver: RunnerDriver, work: list[tuple[Track, int]], places: list[int]
) -> np.ndarray:
    inputs = replace(driver.inputs(work), adapter_ids=np.array(places, np.int32))
    for track, count in work:
        track.num_computed += count
    handle = runner.forward(inputs)
    rows = np.arange(len(inputs.logit_rows), dtype=np.int32)
    return runner.logits(handle, rows) if len(rows) else np.empty((0, 0), np.float32)


@pytest.mark.parametrize(
    ("tuned", "framework"),
    tiny_models.in_frameworks(FAMILIES, FRAMEWORKS, {"jax": ("gpt2", "phi3")}),
    indirect=["tuned"],
)
def test_rows_with_mixed_lora_adapters_equal_peft(framework: str, tuned: Tuned) -> None:
    runner = runner_for(framework, tuned.source, tuned.adapters)
    driver = RunnerDriver(runner)
    places = [0, 1, 1, 2, 3]
    tracks = [driver.add(text) for text in tuned.texts]
    # All but the last token of some rows first, so that the last step mixes long and short rows.
    begun = [(track, len(track.tokens) - 1) for track in tracks[:3]]
    logits_of(runner, driver, begun, places[:3])
    work = [*((track, 1) for track in tracks[:3]), (tracks[3], LENGTHS[3]), (tracks[4], LENGTHS[4])]
    got = logits_of(runner, driver, work, places)
    for row, place in enumerate(places):
        np.testing.assert_allclose(got[row], tuned.expected[place][row], atol=TOLERANCE, rtol=0)
    assert np.abs(tuned.expected[1][1] - tuned.expected[0][1]).max() > 100 * TOLERANCE
    if tuned.merged:
        np.testing.assert_allclose(got[1], tuned.merged[1], atol=TOLERANCE, rtol=0)
    runner.close()


def test_native_rows_without_adapters_keep_their_bits_beside_adapters(tuned: Tuned) -> None:
    """A row's result is the same alone, beside other adapters, and in a runner without any."""
    plain = runner_for("native", tuned.source, [])
    runner = runner_for("native", tuned.source, tuned.adapters)

    def run(each: Any, rows: list[int], places: list[int]) -> np.ndarray:
        driver = RunnerDriver(each)
        work = [(driver.add(tuned.texts[row]), LENGTHS[row]) for row in rows]
        return logits_of(each, driver, work, places)

    mixed = run(runner, [0, 1, 2, 3, 4], [0, 1, 2, 0, 3])
    np.testing.assert_array_equal(mixed[[0, 3]], run(plain, [0, 3], [0, 0]))
    np.testing.assert_array_equal(mixed[1], run(runner, [1], [1])[0])
    np.testing.assert_array_equal(mixed[2], run(runner, [2], [2])[0])
    np.testing.assert_array_equal(mixed[4], run(runner, [4], [3])[0])
    np.testing.assert_array_equal(run(runner, [2], [0]), run(plain, [2], [0]))
