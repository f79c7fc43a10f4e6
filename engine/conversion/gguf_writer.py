"""Writes GGUF files, and chooses the storage type of each tensor in them.

A mix, such as Q4_K_M, has more bits for the tensors whose errors cost most. The choices are those
of llama.cpp, so that files of the same name have the same types.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import pack
from typing import Any

import numpy as np

from engine.architectures.base import ModelConfig
from engine.conversion.stored import Bytes, TargetTensor, most_bytes
from engine.weights.quantize import ENCODERS, fits_rows
from engine.weights.quants import traits_of
from engine.weights.weight import Weight

_GGUF_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10
_ELEMENTS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11}
_ELEMENTS |= {"f8": 12, "b1": _BOOL}

# The type that most tensors of a mix have.
_MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "IQ4_XS": "IQ4_XS"}
GGUF_TYPES = tuple(dict.fromkeys((*ENCODERS, *_MIXES)))
_LOGITS_TYPE = "Q8_0"  # storage type of the LM head (or tied embeddings) in 4-bit models
_FOUR_BITS = ("Q4_0", "Q4_K")
# For each storage type, the type to try next if the row length is not a multiple of its block size.
_NARROWER_BLOCKS = {
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"},
    **dict.fromkeys(("Q4_0", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"), "F16"),
}
_VALUES = re.compile(r"blk\.(\d+)\.attn_(v|qkv|kv_b)\.weight")
_KEYS_AND_VALUES = re.compile(r"blk\.\d+\.attn_(k|v|qkv|kv_b)\.weight")
_DOWN = re.compile(r"blk\.(\d+)\.ffn_down(_exps)?\.weight")
# Values of the GGUF key general.file_type.
_FILE_TYPES = {
    **{"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9},
    **{"Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18},
    **{"IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26},
    **{"IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38},
    **{"NVFP4": 39, "Q1_0": 40},
}


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[TargetTensor]) -> Iterator[Bytes]:
    """Yields the content of a GGUF file, in chunks."""
    stated = {key: value for key, value in metadata.items() if not _is_of_old_file(key)}
    head = bytearray(b"GGUF" + pack("<IQQ", 3, len(tensors), len(stated)))
    for key, value in stated.items():
        head += _string(key) + _value(value)
    offset = 0
    for tensor in tensors:
        dims = pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        head += _string(tensor.name) + dims
        head += pack("<IQ", traits_of(tensor.dtype).type_id, offset)
        offset += _aligned(tensor.nbytes)
    head += bytes(_aligned(len(head)) - len(head))
    yield np.frombuffer(bytes(head), np.uint8)
    for tensor in tensors:
        yield from tensor.pieces()
        yield np.zeros(_aligned(tensor.nbytes) - tensor.nbytes, np.uint8)


def gguf_size(tensors: Iterable[TargetTensor]) -> int:
    """The approximate size of a GGUF file in bytes. The header is small, so it is not counted."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _is_of_old_file(key: str) -> bool:
    return key.startswith("split.") or key == "general.alignment"


def _aligned(size: int) -> int:
    return -(-size // _GGUF_ALIGNMENT) * _GGUF_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case bool():
            return pack("<I?", _BOOL, value)
        case str():
            return pack("<I", _STRING) + _string(value)
        case float():
            return pack("<If", _FLOAT32, value)
        case int() if value < 0:
            return pack("<Ii", _INT32, value)
        case int():
            return pack("<II", _UINT32, value) if value < 2**32 else pack("<IQ", _UINT64, value)
        case np.ndarray():
            flat = np.ascontiguousarray(value)
            flat = flat.astype(flat.dtype.newbyteorder("<"))
            return pack("<IIQ", _ARRAY, _ELEMENTS[flat.dtype.str[1:]], flat.size) + flat.tobytes()
        case list():
            strings = b"".join(map(_string, value))
            return pack("<IIQ", _ARRAY, _STRING, len(value)) + strings
        case _:
            raise AssertionError(f"{type(value).__name__} is no type of metadata")


def file_type(wanted: str | None, tensors: Sequence[TargetTensor]) -> int:
    """The value of general.file_type: the mix, or the storage type that most bytes have."""
    return _FILE_TYPES[wanted if wanted in _MIXES else most_bytes(tensors)]


def gguf_type(weight: Weight, wanted: str | None, config: ModelConfig, is_weighted: bool) -> str:
    """The storage type of a weight in a GGUF file for which the user requested the type `wanted`.
    If `wanted` is None, matrices keep the type that they have, or become F16 if GGUF has no such
    type. `is_weighted` says that there is an importance matrix.

    Vectors, learned position embeddings and the routers of experts are float32, as llama.cpp
    requires. In 4-bit models that are no mixes, the output head (or the embeddings tied to it)
    keeps eight bits.
    """
    spec = weight.spec
    is_vector = len(spec.shape) == (2 if spec.of_experts else 1)
    if is_vector or spec.name == "position.weight" or spec.name.endswith(".router.weight"):
        return "F32"
    if wanted is None:
        now = weight.tensor.dtype
        return now if traits_of(now).type_id is not None else "F16"
    is_logits = spec.name == ("embed.weight" if config.tie_embeddings else "head.weight")
    if wanted in _MIXES:
        chosen = "Q6_K" if is_logits else _mixed(wanted, spec.gguf or "", config, is_weighted)
    else:
        chosen = _LOGITS_TYPE if is_logits and wanted in _FOUR_BITS else wanted
    while not fits_rows(chosen, spec.shape[-1]):
        chosen = _NARROWER_BLOCKS[chosen]
    return chosen


def _mixed(mix: str, name: str, config: ModelConfig, is_weighted: bool) -> str:
    """The type of a matrix inside a layer, or of embeddings. `name` is the GGUF name."""
    layers = config.num_layers
    if config.experts is not None and config.experts.count == 8:
        if _KEYS_AND_VALUES.fullmatch(name):
            return "Q8_0"
        if name.endswith(".attn_output.weight"):
            return "Q6_K" if mix == "Q6_K" else "Q5_K"
    if found := _VALUES.fullmatch(name):
        if mix in ("Q4_K_M", "Q5_K_M") and _has_more_bits(int(found[1]), layers):
            return "Q6_K"
        if mix == "IQ4_XS" and config.num_heads >= 4 * config.num_kv_heads:
            return "Q5_K"
    if found := _DOWN.fullmatch(name):
        if mix in ("Q4_K_M", "Q5_K_M") and _has_more_bits(int(found[1]), layers):
            return "Q6_K"
        if mix == "IQ4_XS" and int(found[1]) < layers // 8 and not is_weighted:
            return "Q5_K"
    return _MIXES[mix]


def _has_more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third layer between them."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2
