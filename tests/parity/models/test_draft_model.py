"""A draft model on real runners changes no token, and no bit of a logprob on the native kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.features.draft_model import with_layers
from engine import LLM, SamplingParams
from engine.core.store.pull import pull
from engine.ipc.options import EngineOptions
from engine.native.execution import build as native
from engine.runtime.model_runner import DeviceInfo, RunnerConfig
from engine.runtime.scheduler import Scheduler
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.runtime.speculation.model_drafts import ModelDrafts
from engine.torch.execution.build import build_runner as build_torch
from engine.weights.model import ModelSource, open_model
from engine.worker.draft import plan_draft
from engine.worker.loading import load_runner
from tests.parity import tiny_models
from tests.parity.torch.test_torch_loop import requests, run
from tests.support.toy_engine.engine import FixedPrice

BUILDS = {"native": native.build_runner, "torch": build_torch}
# Each has arithmetic that the other does not have. Gemma 2 has layers with a sliding window.
PAIRS = [("native", "llama"), ("native", "gemma2"), ("torch", "llama")]


def outputs(path: Path, framework: str, num_layers: int | None) -> tuple[dict[str, list], int]:
    """The tokens and logprobs of sampled requests, with a draft model that has the first layers of
    the model. Also the number of its guesses that were right. None: there is no draft model.
    """
    made: list[Speculation] = []
    asked = [
        structs.replace(
            each,
            params=structs.replace(
                each.params, temperature=0.8 * (index % 2), logprobs=2, seed=index, max_tokens=24
            ),
        )
        for index, each in enumerate(requests())
    ]

    def speculate(scheduler: Scheduler) -> None:
        if num_layers is None:
            return
        source = open_model(path)
        fewer = replace(
            source.config, num_layers=num_layers, layers=source.config.layers[:num_layers]
        )
        config = RunnerConfig("cpu", "float32", 16, 17, 3, tiny_models.MAX_POSITION, 1)
        kept = {
            name: weight
            for name, weight in source.weights.items()
            if not name.startswith("layers.") or int(name.split(".")[1]) < num_layers
        }
        runner = BUILDS[framework](replace(source, config=fewer, weights=kept), config)
        model = ModelDrafts(DraftModel(runner, 64), FixedPrice())
        made.append(Speculation(scheduler.kv, FixedPrice(), model))
        scheduler.attach(made[0])

    shape = {"num_blocks": 64, "max_slots": 4, "budget": 64, "block_size": 16}
    deltas, _ = run(path, "cpu", asked, **shape, build=BUILDS[framework], prepare=speculate)
    found: dict[str, list] = {}
    for delta in deltas:
        pairs = zip(delta.token_ids, delta.logprobs or (), strict=True)
        found.setdefault(delta.request_id, []).extend(pairs)
    return found, sum(each.num_model_accepted for each in made)


@pytest.mark.parametrize(("framework", "name"), PAIRS)
def test_a_draft_model_changes_no_token(framework: str, name: str, tmp_path: Path) -> None:
    _, path = tiny_models.save(name, tmp_path)
    plain, _ = outputs(path, framework, None)
    same, num_right = outputs(path, framework, tiny_models.NUM_LAYERS)
    other, num_by_chance = outputs(path, framework, 1)
    assert num_right > 50 and num_right > num_by_chance
    for drafted in (same, other):
        if framework == "native":
            assert drafted == plain
        else:
            assert tokens(drafted) == tokens(plain)


def tokens(found: dict[str, list]) -> dict[str, list[int]]:
    return {name: [token for token, _ in pairs] for name, pairs in found.items()}


@pytest.fixture(scope="module")
def shortened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model without its last layers."""
    folder = tmp_path_factory.mktemp("draft")
    return with_layers(pull("smollm2-135m-instruct"), folder / "short.gguf", range(20))


@pytest.mark.integration
def test_the_default_model_writes_the_same_text_with_a_draft_model(shortened: Path) -> None:
    prompts = ["The capital of France is", "Count: one, two, three,"]
    params = [
        SamplingParams(temperature=heat, max_tokens=24, seed=3, logprobs=1) for heat in (0.0, 0.9)
    ]
    texts = []
    for settings in ({}, {"model.draft_model": str(shortened)}):
        llm = LLM("smollm2-135m-instruct", max_model_len=256, settings=settings)
        texts.append([each.outputs[0] for each in llm.generate(prompts, params)])
        llm.close()
    plain, drafted = texts
    assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
    assert [each.logprobs for each in plain] == [each.logprobs for each in drafted]


def test_the_memory_plan_counts_the_draft_model(
    shortened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceInfo("cpu", native.STORED, 2**30)
    monkeypatch.setattr(native, "find_device", lambda name, dtype: device)
    path = pull("smollm2-135m-instruct")
    source: ModelSource = open_model(path)
    options = EngineOptions(
        model_path=str(path), framework="native", draft_model=str(shortened), max_seq_len=512
    )
    plan = plan_draft(source, options)
    assert plan.max_slots == 16 and plan.max_seq_len == 512 and plan.num_tokens >= 512
    assert plan.num_bytes > plan.weight_bytes > shortened.stat().st_size / 2
    runner, _, with_draft = load_runner(source, options, plan.num_bytes)
    runner.close()
    runner, _, alone = load_runner(source, options)
    runner.close()
    assert with_draft.num_blocks < alone.num_blocks
