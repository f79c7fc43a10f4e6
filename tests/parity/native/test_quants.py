"""Our dequantizers are bit-identical to the `gguf` package's."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.core.errors import ModelFormatError
from engine.weights.model import open_model
from engine.weights.quantize import quantize
from engine.weights.quants import (
    BY_TYPE_ID,
    TRAITS,
    dequantize,
    for_kernels,
    kernel_type,
)

# The package knows the size of Q1_0 blocks, but does not dequantize them.
OF_THE_PACKAGE = [traits.name for traits in BY_TYPE_ID.values() if traits.name != "Q1_0"]


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_random_quantized_blocks_dequantize_to_the_same_bits(name: str) -> None:
    """All byte patterns are valid blocks; scales that are NaN must stay NaN on both sides."""
    traits = TRAITS[name]
    num_blocks = 400_000 // traits.block_elems  # more than one chunk
    rng = np.random.default_rng(traits.type_id)
    raw = rng.integers(0, 256, (num_blocks, traits.block_bytes), dtype=np.uint8)
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).reshape(num_blocks, traits.block_elems)
    ours = dequantize(name, raw.reshape(-1), expected.shape)
    same = (ours.view(np.uint32) == expected.view(np.uint32)) | (
        np.isnan(ours) & np.isnan(expected)
    )
    assert same.all()


def test_every_type_that_the_gguf_package_dequantizes_is_supported() -> None:
    theirs = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert theirs == set(OF_THE_PACKAGE)


def test_q1_0_blocks_dequantize_by_their_bits() -> None:
    raw = np.zeros(18, np.uint8)
    raw[:2] = np.array([-0.5], np.float16).view(np.uint8)
    raw[2], raw[17] = 0b00000101, 0b10000000
    expected = np.full(128, 0.5, np.float32)
    expected[[0, 2, 127]] = -0.5
    assert np.array_equal(dequantize("Q1_0", raw, (128,)), expected)


@pytest.mark.parametrize("name", [traits.name for traits in BY_TYPE_ID.values()])
def test_block_sizes_and_type_ids_equal_those_of_the_gguf_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    traits = TRAITS[name]
    assert (traits.block_elems, traits.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert traits.type_id == kind.value


RECODED = [each.name for each in BY_TYPE_ID.values() if each.recoding is not None]
# These types have scales that float16 keeps exactly.
EXACT = ("TQ1_0", "TQ2_0", "Q1_0", "NVFP4")


@pytest.mark.parametrize("name", RECODED)
def test_types_converted_for_kernels_keep_their_values(name: str) -> None:
    """Only the scales are rounded, to float16."""
    traits = TRAITS[name]
    rng = np.random.default_rng(traits.block_bytes)
    shape = (40_000 // traits.block_elems, traits.block_elems)
    raw = random_blocks(name, rng, shape[0])
    expected = dequantize(name, raw, shape)
    found = dequantize(kernel_type(name), for_kernels(name, raw), shape)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert largest.min() > 0
    assert (np.abs(found - expected) <= largest * (0 if name in EXACT else 2.0**-9)).all()


def random_blocks(name: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Random bytes with a float16 scale of usual size."""
    raw = rng.integers(0, 256, (count, TRAITS[name].block_bytes), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.1, (count, 1)).astype("<f2").view(np.uint8)
    match name:
        case "NVFP4":
            raw[:, :4] = rng.integers(1, 126, (count, 4))
        case "IQ1_M":
            nibbles = np.stack((scale & 15, scale >> 4), axis=2).reshape(count, 4)
            raw[:, 49::2] = (raw[:, 49::2] & 15) | nibbles << 4
        case "TQ1_0" | "TQ2_0":
            raw[:, -2:] = scale
        case _:
            raw[:, :2] = scale
    return raw.reshape(-1)


def test_tensors_of_the_default_model_dequantize_like_the_gguf_package(default_model: Path) -> None:
    """Offsets, shapes, types and row order of a published file, on its smallest matrices."""
    source = open_model(default_model)
    tensors = source.checkpoint.tensors
    for name in ("blk.0.attn_k.weight", "blk.29.attn_q.weight", "blk.7.ffn_norm.weight"):
        tensor = tensors[name]
        kind = gguf.GGMLQuantizationType[tensor.dtype]
        expected = gguf.quants.dequantize(tensor.raw(), kind).reshape(tensor.shape)
        assert np.array_equal(tensor.numpy(), expected)
    config = source.config
    weight = source.weights["layers.0.attn.k.weight"]
    halves = tensors["blk.0.attn_k.weight"].numpy().reshape(3, config.head_dim // 2, 2, -1)
    assert np.array_equal(
        weight.numpy().reshape(3, 2, config.head_dim // 2, -1)[:, 1], halves[:, :, 1]
    )
    assert (config.family, config.num_layers, config.vocab_size) == ("llama", 30, 49152)
    assert config.tie_embeddings
    assert source.quantization == "Q4_1"
    assert {"embed.weight", "norm.weight", "layers.29.mlp.down.weight"} <= source.weights.keys()


def _values(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    shape = (96, 1024)
    return {
        "normal": rng.standard_normal(shape, np.float32),
        "heavy": rng.standard_t(2, shape).astype(np.float32),
        "positive": np.abs(rng.standard_normal(shape, np.float32)),
        "negative": -np.abs(rng.standard_normal(shape, np.float32)) - 0.5,
        "sparse": rng.standard_normal(shape, np.float32) * (rng.random(shape) > 0.9),
        "zero": np.zeros(shape, np.float32),
        "constant": np.full(shape, -0.3, np.float32),
    }[kind].astype(np.float32)


KINDS = ("normal", "heavy", "positive", "negative", "sparse", "zero", "constant")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0"])
def test_quantizers_are_bit_identical_to_the_gguf_package(name: str, kind: str) -> None:
    values = _values(kind)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert np.array_equal(quantize(name, values), expected.view(np.uint8).reshape(-1))


# Root mean square errors of llama.cpp's `quantize_row_q4_K_ref` on the same values.
OF_LLAMA_CPP = {
    "normal": 0.071788551,
    "heavy": 0.32398402,
    "positive": 0.042441698,
    "negative": 0.040864301,
    "sparse": 0.015725296,
    "zero": 0,
    "constant": 7.3254108e-05,
}


@pytest.mark.parametrize("kind", KINDS)
def test_q4_k_quantization_error_is_no_larger_than_llama_cpps(kind: str) -> None:
    """The two add up floats in another order, so a tie may go either way."""
    values = _values(kind)
    raw = quantize("Q4_K", values)
    decoded = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K).reshape(values.shape)
    error = float(np.sqrt(np.mean((decoded - values).astype(np.float64) ** 2)))
    assert error <= OF_LLAMA_CPP[kind] * 1.002


def test_unsupported_quantizations_are_refused() -> None:
    with pytest.raises(ModelFormatError, match=r"rows of 33 values.*Q8_0 blocks of 32"):
        quantize("Q8_0", np.zeros((2, 33), np.float32))
    with pytest.raises(ModelFormatError, match="nothing is written as IQ2_S"):
        quantize("IQ2_S", np.zeros((2, 256), np.float32))
    for value in (1e6, -1e6):
        with pytest.raises(ModelFormatError, match=r"65,504.*BF16"):
            quantize("F16", np.full((1, 4), value, np.float32))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_an_importance_matrix_lowers_the_error_of_important_columns(name: str) -> None:
    """The importance of a column is that of its place in the row, also in later chunks of rows."""
    values = _values("normal")
    importance = np.random.default_rng(5).gamma(0.3, 1, values.shape[1]).astype(np.float32)
    errors = []
    for weights in (None, importance):
        found = dequantize(name, quantize(name, values, weights), values.shape)
        errors.append(((found - values) ** 2 * importance).sum())
    assert errors[1] < errors[0] * (0.99 if name == "Q6_K" else 0.95)


# Root mean square errors on normal values, which a worse search would exceed.
@pytest.mark.parametrize(
    ("name", "most"),
    [("Q5_K", 0.0365), ("Q6_K", 0.0179), ("IQ4_XS", 0.0773), ("IQ4_NL", 0.0768)],
)
def test_quantizers_that_search_scales_find_good_ones(name: str, most: float) -> None:
    values = _values("normal")
    found = dequantize(name, quantize(name, values), values.shape)
    assert float(np.sqrt(np.mean((found - values) ** 2))) < most
    for kind in ("zero", "constant", "sparse"):
        values = _values(kind)
        found = dequantize(name, quantize(name, values), values.shape)
        assert np.abs(found - values).max() <= 0.25 * np.abs(values).max()
