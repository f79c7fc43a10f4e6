"""Builds a model and fills it from a checkpoint, one tensor at a time.

Parameters are first allocated, uninitialised, in their final dtype and on their device. Each weight
is dequantized, copied into its parameter (or into its rows of a fused parameter) and freed. So the
peak memory is the model plus one float32 tensor. If a layer is to be quantized, this is done before
the next layer is allocated.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.architectures.base import ModelConfig
from engine.architectures.vision import VisionConfig
from engine.core.errors import ModelFormatError
from engine.runners.parameters import ROPE_FACTORS, Weight, check_decoder
from engine.torch.layers.experts import ExpertLinear, GroupedExpertLinear
from engine.torch.layers.linear import Linear
from engine.torch.layers.quantized_linear import (
    GroupedLinear,
    can_quantize,
    quantize_linears,
    quantized,
)
from engine.torch.layers.rotary import Rotary
from engine.torch.models.base import Decoder
from engine.torch.models.blocks import InputNormBlock
from engine.torch.models.encoder import TextEncoder
from engine.torch.models.gpt2 import GPT2
from engine.torch.models.quantized_loading import (
    EMBED,
    keeps_quantized,
    place_quantized,
)
from engine.torch.models.upload import Uploader, can_upload
from engine.torch.models.vision import (
    QwenVision,
    Siglip,
    Vision,
    vision_model,
)
from engine.weights.random import RandomWeight
from engine.weights.weight import Weight as StoredWeight

POSITION = "position.weight"  # later stages of a pipeline don't have it
_WITH_PARTS = (Linear, GroupedLinear, ExpertLinear, GroupedExpertLinear)


def build_model(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    max_seq_len: int,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "auto",
    prepare: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """Builds a decoder with loaded weights. `quantization` is "auto", "fp8" or "int8". "fp8" and
    "int8" quantize all matrices that are not quantized in the checkpoint. `prepare` may remove or
    replace modules before memory is allocated for them.
    """
    with closing(WeightReader(device)) as reader:
        return _build(config, weights, max_seq_len, reader, dtype, quantization, prepare)


def _build(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    max_seq_len: int,
    reader: "WeightReader",
    dtype: torch.dtype,
    quantization: str,
    prepare: Callable[[Decoder], None] | None,
) -> Decoder:
    check_decoder(config, "torch", ("state", "mixer", "mlp", "attention_gate"))
    kind = GPT2 if config.learned_positions and POSITION in weights else Decoder
    device = reader.device
    stored = weights.get(ROPE_FACTORS)
    factors = None if stored is None else reader.read(stored)
    rotaries = tuple(Rotary(rope, max_seq_len, device, factors) for rope in config.ropes)
    keeps, shrinks = keeps_quantized(weights, device), quantization != "auto"
    is_lazy = keeps or shrinks or prepare is not None
    with _factory_defaults(torch.device("meta") if is_lazy else device, dtype):
        model = kind(config, rotaries)
    if prepare is not None:
        prepare(model)
    taken = place_quantized(model, weights, device, dtype) if keeps else set()
    rest = {name: weight for name, weight in weights.items() if name not in taken}
    _check_names(model, rest)
    if shrinks:
        shrunk = _shrink(model, rest, quantization, reader)
        rest = {name: weight for name, weight in rest.items() if name not in shrunk}
    if is_lazy:
        model.to_empty(device=device)
        if config.tie_embeddings and EMBED not in taken:
            model.head.weight = model.embed.weight
    _fill(model, rest, reader)
    if shrinks:
        quantize_linears(model, quantization)  # only a tied LM head is not yet quantized
        for block in model.layers:
            if isinstance(block, InputNormBlock):
                block.quantize_inputs()
    return model


def _shrink(
    model: Decoder, weights: Mapping[str, Weight], quantization: str, reader: "WeightReader"
) -> set[str]:
    """Loads and quantizes the linear layers of a model, one by one. Before that, the whole model is
    on the meta device, without memory. Returns the names of the weights that were loaded.
    """
    taken = set()
    for path in [path for path, _ in model.named_modules()]:  # modules would stay in memory
        module = model.get_submodule(path)
        tied = path == "head" and model.config.tie_embeddings
        if tied or not isinstance(module, Linear) or not can_quantize(module, quantization):
            continue
        module.to_empty(device=reader.device)
        for kind, parameter in module.named_parameters():
            for name, place in _parts(path, kind, module, parameter):
                _put(name, place, weights[name], reader)
                taken.add(name)
        model.set_submodule(path, quantized(module, quantization))
    return taken


def build_encoder_model(
    config: ModelConfig, weights: Mapping[str, Weight], device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    if config.encoder is None or config.norm_placement not in ("input", "sum"):
        raise ModelFormatError(f"the torch framework has no encoder for family '{config.family}'")
    with _factory_defaults(device, dtype):
        model = TextEncoder(config)
    _check_names(model, weights)
    with closing(WeightReader(device)) as reader:
        _fill(model, weights, reader)
    return model


def build_vision_model(
    config: VisionConfig, weights: Mapping[str, Weight], device: torch.device, dtype: torch.dtype
) -> Siglip | QwenVision:
    """Builds an image encoder with loaded weights."""
    with _factory_defaults(device, dtype):
        model = vision_model(config)
    _check_names(model, weights)
    with closing(WeightReader(device)) as reader:
        _fill(model, weights, reader)
    return model


def weights_of(model: Decoder | TextEncoder) -> dict[str, NDArray[np.float32]]:
    """The current weights of a model, as copies, by the names under which they were loaded."""
    return {
        name: place.detach().to(torch.float32, copy=True).numpy() for name, place in _places(model)
    }


@contextmanager
def _factory_defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _check_names(model: Decoder | TextEncoder | Vision, weights: Mapping[str, Weight]) -> None:
    places = dict(_places(model))
    unknown = sorted(weights.keys() - places.keys() - {ROPE_FACTORS})
    missing = sorted(places.keys() - weights.keys())
    if unknown or missing:
        config = model.config
        family = config.kind if isinstance(config, VisionConfig) else config.family
        raise ModelFormatError(
            f"the checkpoint does not fit family '{family}': "
            f"missing weights {missing[:4]}, unexpected weights {unknown[:4]}"
        )


def _fill(model: nn.Module, weights: Mapping[str, Weight], reader: "WeightReader") -> None:
    for name, place in _places(model):
        _put(name, place, weights[name], reader)


def _put(name: str, place: Tensor, weight: Weight, reader: "WeightReader") -> None:
    if _is_stored_by_expert(weight, place):
        for index, part in enumerate(place):
            _put(name, part, weight.expert(index), reader)
        return
    value = reader.read(weight)
    if value.shape != place.shape:
        raise ModelFormatError(
            f"weight '{name}' has shape {tuple(value.shape)}, "
            f"the model's configuration says {tuple(place.shape)}"
        )
    with torch.no_grad():
        place.copy_(value)


def _is_stored_by_expert(weight: Weight, place: Tensor) -> TypeGuard[StoredWeight]:
    """Whether the experts of a weight can be read one by one, which saves host memory."""
    return (
        isinstance(weight, StoredWeight)
        and not isinstance(weight, RandomWeight)  # is drawn on the device, as a whole
        and weight.spec.of_experts
        and weight.spec.shape == place.shape
    )


def _places(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name of each weight, and the tensor that the weight is copied to. This is a parameter of
    the model, or some rows of a fused parameter.
    """
    for name, parameter in model.named_parameters():  # includes a tied weight only once
        path, _, kind = name.rpartition(".")
        yield from _parts(path, kind, model.get_submodule(path), parameter)


def _parts(
    path: str, kind: str, module: nn.Module, parameter: Tensor
) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(module, _WITH_PARTS) or not module.parts:
        yield f"{path}.{kind}", parameter
        return
    start, parent = 0, path.rpartition(".")[0]
    axis = 1 if isinstance(module, ExpertLinear | GroupedExpertLinear) else 0
    for part, size in module.parts:
        yield f"{parent}.{part}.{kind}", parameter.detach().narrow(axis, start, size)
        start += size


class WeightReader:
    """Reads weights for a device. `close` frees its threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._uploader: Uploader | None = None

    def read(self, weight: Weight) -> Tensor:
        """The values of a weight, on the device or on the host. Random weights are generated on the
        device, always in bfloat16, so that models of every dtype get the same values.
        """
        device = self.device
        if isinstance(weight, RandomWeight):
            normal = weight.values
            generator = torch.Generator(device).manual_seed(normal.seed)
            drawn = torch.randn(
                weight.spec.shape, generator=generator, device=device, dtype=torch.bfloat16
            )
            return drawn.mul_(normal.std).add_(normal.mean)
        if can_upload(weight, device):
            if self._uploader is None:
                self._uploader = Uploader(device)
            return self._uploader.upload(weight)
        values = weight.numpy()
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.close()
