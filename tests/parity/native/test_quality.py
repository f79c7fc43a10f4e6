"""Importance matrices and quality figures, from the activations and logits of Transformers."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.conversion.importance import read_importance, write_importance
from engine.tools import quality
from engine.tools.quality import compare_models, importance_of
from engine.weights.model import open_model
from tests.parity import tiny_models

WINDOWS = [tiny_models.text(seed=1), tiny_models.text(seed=2)]


@pytest.mark.parametrize("has_torch", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_importance_matrix_is_the_mean_square_of_the_inputs(
    name: str, has_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused matrices (llama's q, k, v; gate, up) and matrices that GGUF stores as one (GPT-2)."""
    if not has_torch:
        monkeypatch.setattr(quality, "find_spec", lambda name: name != "torch" or None)
    theirs, path = tiny_models.save(name, tmp_path)
    squares: dict[str, torch.Tensor] = {}

    def record(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        total = inputs[0].detach().flatten(0, -2).double().square().sum(0)
        squares[places[module]] = squares.get(places[module], torch.zeros(())) + total

    pairs = {
        "llama": {
            "self_attn.k_proj": "attn_k",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        "gpt2": {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_proj": "ffn_down"},
    }[name]
    layers = theirs.model.layers if name == "llama" else theirs.transformer.h
    places = {
        layer.get_submodule(ours): f"blk.{index}.{stored}.weight"
        for index, layer in enumerate(layers)
        for ours, stored in pairs.items()
    }
    for module in places:
        module.register_forward_pre_hook(record)
    with torch.no_grad():
        for window in WINDOWS:
            theirs(torch.tensor([window]))
    sums = importance_of(open_model(path), WINDOWS)
    tokens = sum(map(len, WINDOWS))
    for stored, total in squares.items():
        found, count = sums[stored]
        assert count == tokens
        np.testing.assert_allclose(found, total.numpy(), rtol=1e-4)
    write_importance(tmp_path / "im.gguf", sums, "text", len(WINDOWS), len(WINDOWS[0]))
    means = read_importance(tmp_path / "im.gguf")
    assert means.keys() == sums.keys()
    for stored, total in squares.items():
        np.testing.assert_allclose(means[stored][0], total.numpy() / tokens, rtol=1e-4)
    written = {each.name: each for each in gguf.GGUFReader(tmp_path / "im.gguf").tensors}
    place = next(iter(squares))
    assert written[f"{place}.counts"].data.item() == tokens
    assert written[f"{place}.in_sum2"].data.size == len(squares[place])


def test_measured_quality_equals_that_of_the_logits(tmp_path: Path) -> None:
    theirs, path = tiny_models.save("llama", tmp_path)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    theirs.save_pretrained(tmp_path / "other")
    found = compare_models(path, tmp_path / "other", WINDOWS, lambda done, total: None)
    losses = []
    for window in WINDOWS:
        with torch.no_grad():
            logits = theirs(torch.tensor([window])).logits[0]
        half = len(window) // 2
        target = torch.tensor(window[half + 1 :])
        losses.append(torch.nn.functional.cross_entropy(logits[half:-1], target, reduction="none"))
    assert found.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
    assert found.perplexity != pytest.approx(found.reference_perplexity, rel=1e-3)
    assert found.num_tokens == len(torch.cat(losses))
    assert 0.001 < found.divergence < 1 and found.same_top > 0.5
    same = compare_models(path, path, WINDOWS, lambda done, total: None)
    assert (same.divergence, same.same_top) == (0, 1)
