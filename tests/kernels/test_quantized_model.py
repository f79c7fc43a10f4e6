"""A GGUF model computes the same with its quantized weights as with dequantized ones."""

import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.architectures.base import ExpertsConfig
from engine.torch.layers.experts import GroupedExpertLinear
from engine.torch.layers.linear import Linear
from engine.torch.layers.quantized_linear import (
    Fp8Linear,
    GroupedEmbedding,
    GroupedLinear,
)
from engine.torch.models.base import Decoder
from engine.torch.models.loading import build_model
from engine.torch.models.quantized_loading import placed_bytes
from engine.weights.model import ModelSource, Weight, open_model
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf

TOKENS = 7
Q4_0, Q4_1, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0"))


class Decoded:
    """A weight that hides how it is stored."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def numpy(self) -> np.ndarray:
        return self.weight.numpy()


def write(path: Path, tied: bool) -> ModelSource:
    """Query and key of one type, value of another, as mixed files have them; biases are floats."""
    config = tiny_config("llama", qkv_bias=True, tie_embeddings=tied)
    weights = {name: values * 0.2 for name, values in random_weights(config).items()}
    stored, types = gguf_layout(config, weights), {}
    for name in [name for name, values in stored.items() if values.ndim == 2]:
        kind = Q8_0 if "attn_v" in name or "embd" in name else Q4_1 if "ffn" in name else Q4_0
        stored[name], types[name] = gguf.quants.quantize(stored[name], kind), kind
    write_gguf(path, config, stored, types=types)
    return open_model(path)


def build(
    source: ModelSource, decoded: bool, device: torch.device, quantization: str = "auto"
) -> Decoder:
    weights = {
        name: Decoded(weight) if decoded else weight for name, weight in source.weights.items()
    }
    return build_model(source.config, weights, TOKENS, device, torch.float32, quantization)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_quantized_model_computes_the_same_as_the_dequantized_one(
    tmp_path: Path, tied: bool, device: torch.device
) -> None:
    source = write(tmp_path / "model.gguf", tied)
    kept, decoded = build(source, False, device), build(source, True, device)
    assert isinstance(kept.embed, GroupedEmbedding)
    assert not any(isinstance(module, Linear) for module in kept.modules())
    assert [len(m.stacks) for m in kept.layers[0].modules() if isinstance(m, GroupedLinear)] == [
        2,  # query and key, value
        1,
        1,
        1,
    ]
    ids = torch.arange(TOKENS, device=device)
    with torch.inference_mode():
        torch.testing.assert_close(
            kept.forward_sequence(ids), decoded.forward_sequence(ids), rtol=1e-3, atol=1e-3
        )


def test_expert_weights_stay_quantized_on_the_gpu(tmp_path: Path, device: torch.device) -> None:
    experts = ExpertsConfig(count=3, per_token=2, size=32, renormalizes=True)
    config = tiny_config("qwen3_moe", num_layers=1, qk_norm="head", experts=experts)
    weights = {name: values * 0.2 for name, values in random_weights(config).items()}
    stored: dict[str, Any] = gguf_layout(config, weights)
    types = {}
    for name in [name for name in stored if "_exps" in name]:
        types[name] = Q8_0 if "down" in name else Q4_1
        stored[name] = gguf.quants.quantize(stored[name], types[name])
    sizes = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32}
    extra = {f"qwen3moe.{key}": value for key, value in sizes.items()}
    write_gguf(tmp_path / "model.gguf", config, stored, extra, types=types)
    source = open_model(tmp_path / "model.gguf")
    kept, decoded = build(source, False, device), build(source, True, device)
    layers = [m for m in kept.modules() if isinstance(m, GroupedExpertLinear)]
    assert [layer.rows.bits for layer in layers] == [4, 8]
    quantized = sum(layer.rows.nbytes for layer in layers)
    plain = sum(p.nbytes for p in kept.parameters())
    assert placed_bytes(source.weights, 4, shrinks=False) == quantized + plain
    ids = torch.arange(3, device=device)
    with torch.inference_mode():
        torch.testing.assert_close(
            kept.forward_sequence(ids), decoded.forward_sequence(ids), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_model_quantized_at_load_stays_close_to_the_original(
    tmp_path: Path, kind: str, tied: bool, device: torch.device
) -> None:
    source = write(tmp_path / "model.gguf", tied)
    exact, model = build(source, True, device), build(source, True, device, kind)
    layers = [m for m in model.modules() if isinstance(m, GroupedLinear | Fp8Linear)]
    assert len(layers) == 4 * source.config.num_layers + 1
    assert not any(isinstance(module, Linear) for module in model.modules())
    ids = torch.arange(TOKENS, device=device)
    with torch.inference_mode():
        expected = exact.forward_sequence(ids)
        drift = (model.forward_sequence(ids) - expected).std() / expected.std()
    assert 0 < drift < (0.1 if kind == "fp8" else 0.02)


def test_loading_quantizes_one_layer_at_a_time_to_bound_memory(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a weight is read, no plain matrix has memory but the one that it goes to."""
    source = write(tmp_path / "model.gguf", tied=False)
    made: weakref.WeakSet[Linear] = weakref.WeakSet()
    create = Linear.__init__

    def noted(self: Linear, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        made.add(self)

    monkeypatch.setattr(Linear, "__init__", noted)
    plain: list[int] = []

    class Watched(Decoded):
        def numpy(self) -> np.ndarray:
            plain.append(sum(not layer.weight.is_meta for layer in made))
            return super().numpy()

    weights = {name: Watched(weight) for name, weight in source.weights.items()}
    build_model(source.config, weights, TOKENS, device, torch.float32, "fp8")
    assert max(plain) == 1
