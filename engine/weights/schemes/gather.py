"""Gathers the tensors of each quantized matrix into one, as `quantization_config` in config.json
describes them.

Shapes are checked when the checkpoint is opened, and values are read when a tensor is used. Scales
of activations and of the KV cache are dropped, because these are computed in more bits here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from engine.architectures.base import Reader
from engine.core.errors import ModelFormatError
from engine.weights.schemes.floats import (
    bitsandbytes,
    fp8,
    fp8_matrix,
    mxfp4,
    packed_fp4,
)
from engine.weights.schemes.integers import awq, gptq, packed_integers, plain_int8
from engine.weights.schemes.parts import (
    WHERE,
    Finder,
    Found,
    Parts,
    Tensors,
    fail,
    setting,
)

_DROPPED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale"),
)
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)


def gather(tensors: Tensors, stated: Mapping[str, Any]) -> Tensors:
    """The tensors of a checkpoint, with those of each quantized matrix gathered into one. `stated`
    is the content of `quantization_config`.
    """
    reader = Reader(stated, WHERE)
    method = reader.read(str, "quant_method")
    if method not in _METHODS:
        raise ModelFormatError(
            f"{WHERE}: quant_method '{method[:40]}' is not supported (supported: "
            f"{', '.join(_METHODS)}); use the unquantized checkpoint or a GGUF file"
        )
    find = _METHODS[method](reader)
    rest = {name: each for name, each in tensors.items() if not name.endswith(_DROPPED)}
    matrices: Tensors = {}
    for name in list(rest):
        if name in rest and (found := find(Parts(name, rest))) is not None:
            base, matrix = found
            matrices[base] = matrix.tensor(base)
    if not matrices:
        raise ModelFormatError(f"{WHERE}: no tensor is stored as quant_method '{method}' says")
    return rest | matrices


def _compressed_tensors(reader: Reader) -> Finder:
    setting(reader, str, "format", _FORMATS)
    for key in ("sparsity_config", "transform_config"):
        stated = reader.read(dict, key, default={})
        if stated and stated.get("format") != "dense":
            raise ModelFormatError(f"{WHERE}: key '{key}' is not supported")
    size = _block_structure(reader.read(dict, "config_groups", default={}))

    def find(parts: Parts) -> Found:
        base, is_packed, rest = parts.name.partition(".weight_packed")
        if is_packed and not rest:
            is_integers = parts.tensors[parts.name].dtype == "I32"
            matrix = (packed_integers if is_integers else packed_fp4)(parts, base)
            return f"{base}.weight", matrix
        base, is_scale, rest = parts.name.partition(".weight_scale")
        if not is_scale or rest or parts.has(f"{base}.weight_packed"):
            return None
        if not parts.has(f"{base}.weight"):
            fail(parts.name, f"has no '{base}.weight' beside it")
        if parts.has(f"{base}.weight_zero_point"):
            fail(f"{base}.weight", "has 8-bit values with a zero point, which is not supported")
        if parts.tensors[f"{base}.weight"].dtype == "I8":
            return f"{base}.weight", plain_int8(parts, base)
        return f"{base}.weight", fp8_matrix(parts, base, parts.name, size)

    return find


def _block_structure(groups: Mapping[str, Any]) -> list[Any] | None:
    """The size of blocks with a scale of their own, if any group of layers has such."""
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and isinstance(weights.get("block_structure"), list):
            return weights["block_structure"]
    return None


_METHODS: dict[str, Callable[[Reader], Finder]] = {
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
}
