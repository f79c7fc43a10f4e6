"""Extreme sampling parameters, tiny or huge, mean the same on every framework."""

from pathlib import Path

import pytest

from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.tools.profiling import DrivenEngine
from engine.weights.model import open_model
from tests.parity import tiny_models

GREEDY = {"temperature": 0.0}
AS_GOOD_AS_GREEDY = {
    "top_p": {"temperature": 1.0, "top_p": 1e-50},
    "a subnormal top_p": {"temperature": 1.0, "top_p": 1e-40},
    "temperature": {"temperature": 1e-39},
    "a low temperature": {"temperature": 2e-30, "top_k": 2**31},
    "both": {"temperature": 1e-45, "top_p": 1e-45},
}


COMPILED = [pytest.param(name, marks=pytest.mark.integration) for name in ("jax", "tinygrad")]


@pytest.mark.parametrize("framework", ["native", "torch", *COMPILED])
def test_near_zero_temperature_top_p_and_top_k_are_greedy_on_every_framework(
    framework: str, tmp_path: Path
) -> None:
    tiny_models.make("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    options = EngineOptions(
        model_path=str(tmp_path), framework=framework, dtype="float32", max_slots=8, max_seq_len=64
    )
    settings = {"greedy": GREEDY, **AS_GOOD_AS_GREEDY}
    source = open_model(tmp_path)
    engine = DrivenEngine(source, options)
    run = engine.generate(
        [
            GenerateRequest(
                request_id=name,
                prompt=(5, 6, 7, 8),
                params=SamplingParams(max_tokens=8, ignore_eos=True, seed=1, **each),
            )
            for name, each in settings.items()
        ]
    )
    engine.close()
    source.close()
    found: dict[str, list[int]] = {name: [] for name in settings}
    for _, delta in run.answers:
        found[delta.request_id] += delta.token_ids
    assert len(found["greedy"]) == 8
    assert found == dict.fromkeys(settings, found["greedy"])
