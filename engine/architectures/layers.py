"""Reads settings that differ between the layers of a model: windows, RoPE, experts.

In many models, most layers attend to a window ("sliding_attention"), and every n-th layer attends
to all positions ("full_attention").
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.architectures.base import LayerConfig, Reader, RopeConfig
from engine.architectures.family import More, Settings
from engine.architectures.rope import rope_from_hf
from engine.core.errors import ModelFormatError

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def layer_settings(found: Settings, layers: Sequence[LayerConfig]) -> Settings:
    """The fields of `ModelConfig` for these layers. If all layers are alike, they need no list."""
    first = layers[0]
    has_experts = found["experts"] is not None
    alike = all(layer == first for layer in layers)
    if alike and first.rope == found["rope"] and first.experts == has_experts:
        return {"sliding_window": first.window, "layers": ()}
    return {"sliding_window": None, "layers": tuple(layers)}


def local_layers(reader: Reader, num_layers: int, period: int) -> list[bool]:
    """For each layer of a config.json, whether it attends to a window. If the file does not say
    so, every layer does except those whose number is a multiple of `period`.
    """
    listed: list[Any] | None = reader.read(list, "layer_types", default=None)
    if listed is not None:
        if len(listed) < num_layers or not all(kind in (_LOCAL, _GLOBAL) for kind in listed):
            raise ModelFormatError(
                f"config.json: key 'layer_types' must have '{_LOCAL}' or '{_GLOBAL}' "
                f"for each of the {num_layers} layers"
            )
        return [kind == _LOCAL for kind in listed[:num_layers]]
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        stated = reader.source.get(key)
        if isinstance(stated, str) and stated and set(stated) <= {"L", "G"}:
            return [stated[index % len(stated)] == "L" for index in range(num_layers)]
        period = reader.read(int, key, default=period)
    return [period < 1 or (index + 1) % period != 0 for index in range(num_layers)]


def gguf_local_layers(reader: Reader, num_layers: int, period: int) -> list[bool]:
    """Like `local_layers`, for GGUF metadata."""
    key = f"{reader.read(str, 'general.architecture')}.attention.sliding_window_pattern"
    stated = reader.source.get(key)
    if isinstance(stated, np.ndarray):
        if len(stated) < num_layers:
            raise ModelFormatError(f"GGUF metadata: key '{key}' must have {num_layers} entries")
        return [bool(each) for each in stated[:num_layers]]
    period = reader.read(int, key, default=period)
    return [period < 1 or (index + 1) % period != 0 for index in range(num_layers)]


def alternating(
    period: int,
    *,
    window: int | None = None,
    local_theta: float | None = None,
    plain_local: bool = False,
    rotates_global: bool = True,
) -> tuple[More, More]:
    """Functions that read the layers of a family from config.json and from GGUF metadata.

    `window` is the window if config.json does not state it. With `local_theta`, windowed layers
    have a RoPE base of their own. With `plain_local`, RoPE scaling rules apply to the other layers
    only. Without `rotates_global`, only windowed layers rotate queries and keys.
    """

    def settings(
        found: Settings, local: list[bool], size: int | None, rope: RopeConfig
    ) -> Settings:
        has_experts = found["experts"] is not None
        if size is None:
            local = [False] * len(local)
        full = found["rope"] if rotates_global or not any(local) else None
        kinds = {
            True: LayerConfig(size, rope, has_experts),
            False: LayerConfig(None, full, has_experts),
        }
        return layer_settings(found, [kinds[each] for each in local])

    def from_hf(reader: Reader, found: Settings) -> Settings:
        size = reader.read(int, "sliding_window", default=None)
        if size is None and not reader.has("sliding_window"):
            size = window
        local = local_layers(reader, found["num_layers"], period)
        return settings(found, local, size, _local_rope(reader, found, local_theta, plain_local))

    def from_gguf(reader: Reader, found: Settings) -> Settings:
        prefix = reader.read(str, "general.architecture")
        rope: RopeConfig = found["rope"]
        theta = local_theta if local_theta is not None else rope.theta
        theta = reader.read(float, f"{prefix}.rope.freq_base_swa", default=theta)
        if plain_local:
            rope = RopeConfig(theta, rope.dim)
        local = gguf_local_layers(reader, found["num_layers"], period)
        return settings(found, local, found["sliding_window"], replace(rope, theta=theta))

    return from_hf, from_gguf


def _local_rope(
    reader: Reader, found: Settings, local_theta: float | None, plain: bool
) -> RopeConfig:
    """RoPE of the windowed layers of a config.json."""
    rope: RopeConfig = found["rope"]
    theta = local_theta if local_theta is not None else rope.theta
    settings = reader.read(dict, "rope_parameters", default={})
    if any(isinstance(each, dict) for each in settings.values()):
        length, part = found["max_position"], rope.dim / found["head_dim"]
        return rope_from_hf(reader.source, found["head_dim"], length, theta, part, _LOCAL)
    theta = reader.read(float, "rope_local_base_freq", default=theta)
    return RopeConfig(theta, rope.dim) if plain else replace(rope, theta=theta)


def qwen_window(reader: Reader, found: Settings) -> Settings:
    """Qwen's windows: those of the layers after the first `max_window_layers`, if switched on."""
    count = found["num_layers"]
    window = reader.read(int, "sliding_window", default=None)
    if window is None or not reader.read(bool, "use_sliding_window", default=False):
        return {"sliding_window": None}
    full = reader.read(int, "max_window_layers", default=_QWEN_FULL_LAYERS)
    local = [index >= full for index in range(count)]
    if reader.read(list, "layer_types", default=None) is not None:
        local = local_layers(reader, count, 1)
    has_experts = found["experts"] is not None
    kinds = [LayerConfig(window if each else None, found["rope"], has_experts) for each in local]
    return layer_settings(found, kinds)


# Transformers' default of max_window_layers, the number of layers without a sliding window.
_QWEN_FULL_LAYERS = 28


def sparse_layers(reader: Reader, found: Settings) -> Settings:
    """Qwen's mixtures of experts, in which some layers may have a plain MLP."""
    window = qwen_window(reader, found)
    count = found["num_layers"]
    step = reader.read(int, "decoder_sparse_step", default=1)
    dense: list[Any] = reader.read(list, "mlp_only_layers", default=[])
    sparse = [index not in dense and step > 0 and (index + 1) % step == 0 for index in range(count)]
    layers = window.get("layers") or [
        LayerConfig(window["sliding_window"], found["rope"], True) for _ in range(count)
    ]
    mixed = [replace(layer, experts=has) for layer, has in zip(layers, sparse, strict=True)]
    return layer_settings(found, mixed)


def smollm3_layers(reader: Reader, found: Settings) -> Settings:
    """SmolLM3's layers without rotation: those with a 0 in `no_rope_layers`, else every fourth."""
    count = found["num_layers"]
    interval = reader.read(int, "no_rope_layer_interval", default=_NOPE_INTERVAL)
    rotates = [(index + 1) % max(interval, 1) != 0 for index in range(count)]
    listed: list[Any] | None = reader.read(list, "no_rope_layers", default=None)
    if listed is not None:
        if len(listed) < count:
            raise ModelFormatError(f"config.json: key 'no_rope_layers' must have {count} entries")
        rotates = [bool(each) for each in listed[:count]]
    rope = found["rope"]
    return layer_settings(
        found, [LayerConfig(None, rope if each else None, False) for each in rotates]
    )


_NOPE_INTERVAL = 4
