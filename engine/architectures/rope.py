"""Reads RoPE settings from config.json and from GGUF metadata.

Older config.json files have the keys `rope_theta` and `rope_scaling`. Newer config.json files have
one key `rope_parameters`. GGUF has its own keys. A scaling rule that is not implemented causes an
error, because the model would generate nonsense without its rule.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.architectures.base import ModelConfig, Reader, RopeConfig
from engine.core.errors import ModelFormatError

DEFAULT_THETA = 10_000.0
YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0

MAX_POSITION = 2**31 - 1  # positions are int32

# The factors of "longrope" in a GGUF file. They become a part of the config.
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def rope_from_hf(
    config: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    theta: float = DEFAULT_THETA,
    part: float = 1.0,
    layer_type: str | None = None,
) -> RopeConfig:
    """The RoPE settings of the layers of one type; None: of all layers. `theta` and `part` are the
    base and the rotated part of a head if the config does not state them.
    """
    top = Reader(config, "config.json")
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    where = f"config.json {key}"
    settings: dict[str, Any] = top.read(dict, key, default={})
    if any(isinstance(value, Mapping) for value in settings.values()):
        if layer_type is None:
            raise ModelFormatError(
                f"{where}: settings that differ between layers are not supported in this family"
            )
        settings = Reader(settings, where).read(dict, layer_type, default={})
    reader = Reader(settings, where)
    if reader.read(float, "llama_4_scaling_beta", default=0.0):
        raise ModelFormatError(f"{where}: key 'llama_4_scaling_beta' is not supported")
    theta = _stated(reader, top, "rope_theta", theta)
    part = _stated(reader, top, "partial_rotary_factor", part)
    if not 0 < part <= 1:
        raise ModelFormatError(f"{where}: key 'partial_rotary_factor' must be above 0 and up to 1")
    original = top.read(int, "original_max_position_embeddings", default=None) or reader.read(
        int, "original_max_position_embeddings", default=max_position
    )
    plain = RopeConfig(theta=theta, dim=int(head_dim * part))
    return _check_rope(_scaled_from_hf(plain, reader, where, original, max_position), where)


def _scaled_from_hf(
    plain: RopeConfig, reader: Reader, where: str, original: int, max_position: int
) -> RopeConfig:
    """`plain` with the scaling rule that `reader` states. `original` is the context length before
    the rule extends it.
    """
    kind = reader.read(str, "rope_type", default=None) or reader.read(
        str, "type", default="default"
    )
    match kind:
        case "default" | "mrope":
            return replace(plain, sections=_sections(reader, plain.dim))
        case "linear":
            return replace(plain, kind="linear", factor=reader.read(float, "factor"))
        case "dynamic":
            # The dynamic rule changes the frequencies of sequences that are longer than
            # max_position. The engine serves no such sequences, because cached keys must not depend
            # on how long their sequence becomes later.
            return replace(
                plain,
                kind="dynamic",
                factor=reader.read(float, "factor"),
                original_max_position=max_position,
            )
        case "llama3":
            return replace(
                plain,
                kind="llama3",
                factor=reader.read(float, "factor"),
                original_max_position=original,
                low_freq_factor=reader.read(float, "low_freq_factor"),
                high_freq_factor=reader.read(float, "high_freq_factor"),
            )
        case "yarn":
            return _yarn_from_hf(plain, reader, original, max_position)
        case "longrope" | "su":
            return _longrope(
                plain,
                reader.read(float, "factor", default=None) or max_position / max(original, 1),
                original,
                reader.read(float, "attention_factor", default=None),
                _factors(reader, "short_factor"),
                _factors(reader, "long_factor"),
            )
        case _:
            raise ModelFormatError(
                f"{where}: rope type '{kind}' is not supported "
                "(supported: default, linear, dynamic, llama3, yarn, longrope)"
            )


def _sections(reader: Reader, dim: int) -> tuple[int, ...]:
    listed: list[Any] = reader.read(list, "mrope_section", default=[])
    if listed and (not all(type(each) is int for each in listed) or 2 * sum(listed) != dim):
        raise ModelFormatError(f"config.json: key 'mrope_section' must add up to {dim // 2}")
    return tuple(listed)


def _stated(reader: Reader, top: Reader, key: str, default: float) -> float:
    """A setting that is among the RoPE settings, or at the top of config.json in older files."""
    found = reader.read(float, key, default=None)
    return top.read(float, key, default=default) if found is None else found


def _factors(reader: Reader, key: str) -> tuple[float, ...]:
    listed: list[Any] = reader.read(list, key)
    return tuple(Reader({key: each}, f"a factor in '{key}'").read(float, key) for each in listed)


def _longrope(
    plain: RopeConfig,
    factor: float,
    original: int,
    attention: float | None,
    short: tuple[float, ...],
    long: tuple[float, ...],
) -> RopeConfig:
    if attention is None:
        attention = 1.0
        if factor > 1 and original > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        plain,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        short_factors=short,
        long_factors=long,
        attention_factor=attention,
    )


def _yarn_from_hf(
    plain: RopeConfig, reader: Reader, original: int, max_position: int
) -> RopeConfig:
    factor = reader.read(float, "factor", default=None) or max_position / max(original, 1)
    attention = reader.read(float, "attention_factor", default=None)
    mscale = reader.read(float, "mscale", default=None)
    mscale_all = reader.read(float, "mscale_all_dim", default=None)
    if attention is None and mscale and mscale_all:
        attention = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=reader.read(float, "beta_fast", default=None) or YARN_BETA_FAST,
        beta_slow=reader.read(float, "beta_slow", default=None) or YARN_BETA_SLOW,
        truncate=reader.read(bool, "truncate", default=True),
        attention_factor=attention,
    )


def rope_from_gguf(metadata: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    where = "GGUF metadata"
    reader = Reader(metadata, where)
    prefix = f"{reader.read(str, 'general.architecture')}.rope"
    plain = RopeConfig(
        theta=reader.read(float, f"{prefix}.freq_base", default=DEFAULT_THETA),
        dim=reader.read(int, f"{prefix}.dimension_count", default=head_dim),
    )
    factor = reader.read(float, f"{prefix}.scaling.factor", default=None)
    old_factor = reader.read(float, f"{prefix}.scale_linear", default=None)
    # Old converters wrote only a factor, without the scaling type, and meant linear scaling. A
    # factor of 0 or 1 means no scaling.
    implied = "linear" if (factor or old_factor or 1.0) != 1.0 else "none"
    kind = reader.read(str, f"{prefix}.scaling.type", default=implied)
    match kind:
        case "none":
            rope = plain
        case "linear":
            rope = replace(plain, kind="linear", factor=factor or old_factor or 1.0)
        case "yarn":
            factor = reader.read(float, f"{prefix}.scaling.factor")
            stretch = reader.read(float, f"{prefix}.scaling.attn_factor", default=None)
            rope = replace(
                plain,
                kind="yarn",
                factor=factor,
                original_max_position=reader.read(
                    int, f"{prefix}.scaling.original_context_length", default=max_position
                ),
                beta_fast=reader.read(
                    float, f"{prefix}.scaling.yarn_beta_fast", default=YARN_BETA_FAST
                ),
                beta_slow=reader.read(
                    float, f"{prefix}.scaling.yarn_beta_slow", default=YARN_BETA_SLOW
                ),
                # In a GGUF file, attn_factor multiplies YaRN's default magnitude. The engine's
                # `attention_factor` replaces that default, so it is the product of both.
                attention_factor=stretch and stretch * yarn_magnitude(factor, 1.0),
            )
        case "longrope":  # the factors are tensors: see `with_long_factors`
            rope = plain
        case _:
            raise ModelFormatError(
                f"{where}: key '{prefix}.scaling.type': '{kind}' is not supported "
                "(supported: none, linear, yarn, longrope)"
            )
    return _check_rope(rope, where)


def with_long_factors(
    config: ModelConfig,
    metadata: Mapping[str, Any],
    short: tuple[float, ...],
    long: tuple[float, ...],
) -> ModelConfig:
    """The config of a model whose GGUF file has the factors of "longrope" as tensors."""
    where = "GGUF metadata"
    reader = Reader(metadata, where)
    prefix = f"{reader.read(str, 'general.architecture')}.rope.scaling"
    if config.rope is None or config.rope.kind != "default":
        raise ModelFormatError(
            "the checkpoint stores the factors of 'longrope' and names another scaling rule; "
            "only one can hold"
        )
    original = reader.read(int, f"{prefix}.original_context_length", default=config.max_position)
    stretch = config.max_position / max(original, 1)
    attention = reader.read(float, f"{prefix}.attn_factor", default=None)
    rope = _longrope(config.rope, stretch, original, attention, short, long)
    return replace(config, rope=_check_rope(rope, where))


def stretched_position(rope: RopeConfig, max_position: int) -> int:
    """The max context length that the model supports. YaRN checkpoints often state only the length
    before context extension. For them, the result is at least original length * factor.
    """
    if rope.kind == "yarn" and rope.original_max_position is not None:
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def with_factors(config: ModelConfig) -> ModelConfig:
    """Changes the config's RoPE kind to "factors". This is for files with a vector of frequency
    factors, by which the RoPE frequencies are divided. GGUF files of Llama 3 models have it.
    """
    if config.rope is None or config.rope.kind != "default":
        raise ModelFormatError(
            "the checkpoint stores rotary frequency factors and also names a scaling rule; "
            "only one can hold"
        )
    return replace(config, rope=replace(config.rope, kind="factors"))


def yarn_magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _check_rope(rope: RopeConfig, where: str) -> RopeConfig:
    """Returns `rope`. Raises `ModelFormatError` if a number is not finite, not above zero or not
    usable in the formula of the scaling rule.
    """
    numbers = {
        "theta": rope.theta,
        "factor": rope.factor,
        "original_max_position": rope.original_max_position,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
    }
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise ModelFormatError(
                f"{where}: rotary {name} must be above 0 and finite, found {number}"
            )
    if rope.kind == "llama3" and rope.low_freq_factor == rope.high_freq_factor:
        raise ModelFormatError(f"{where}: low_freq_factor and high_freq_factor must differ")
    if rope.dim < 2 or (rope.kind == "dynamic" and rope.dim == 2):
        raise ModelFormatError(f"{where}: {rope.dim} rotated values of a head are too few")
    if rope.kind == "longrope":
        for factors in (rope.short_factors, rope.long_factors):
            if len(factors) != rope.dim // 2 or not all(0 < each < math.inf for each in factors):
                raise ModelFormatError(
                    f"{where}: longrope needs {rope.dim // 2} short and long factors above 0"
                )
        if rope.original_max_position == 1:
            raise ModelFormatError(f"{where}: longrope needs an original context of 2 or more")
    if rope.kind == "yarn":
        if rope.theta == 1:
            raise ModelFormatError(f"{where}: yarn needs another rotary theta than 1")
        if (rope.original_max_position or 1) * rope.factor > MAX_POSITION:
            raise ModelFormatError(f"{where}: yarn reaches beyond position {MAX_POSITION}")
    return rope
