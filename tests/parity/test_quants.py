"""Our decoders against the `gguf` package's, to the last bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.backends.custom.weights.model import open_model
from engine.backends.custom.weights.quants import TRAITS, dequantize


@pytest.mark.parametrize("name", TRAITS)
def test_random_blocks_decode_to_the_same_bits(name: str) -> None:
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


@pytest.mark.parametrize("name", TRAITS)
def test_traits_are_those_of_the_format(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    traits = TRAITS[name]
    assert (traits.block_elems, traits.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert traits.type_id == kind.value


def test_default_model_decodes_as_the_package_decodes_it(default_model: Path) -> None:
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
