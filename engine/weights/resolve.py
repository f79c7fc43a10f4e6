"""Finds the stored tensor of each weight under the engine's name for it, and checks the tensors:
that none is missing or unknown, their shapes and types, and a sample of their values.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from engine.architectures.base import Architecture, ModelConfig
from engine.architectures.rope import LONG_FACTORS
from engine.architectures.tensors import TensorSpec
from engine.architectures.vision import VisionConfig
from engine.architectures.vision.files import UNUSED_PREFIX, vision_tensors
from engine.core.errors import ModelFormatError
from engine.weights.lazy_tensor import Checkpoint, LazyTensor
from engine.weights.quants import TRAITS, dequantize, traits_of
from engine.weights.weight import Weight

log = logging.getLogger(__name__)

# Tensors that checkpoints may contain but the engine does not need: RoPE tables, causal masks,
# position ids, and the pooler of an encoder.
_IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "embeddings.position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
    *LONG_FACTORS,
)
_SAMPLED_BLOCKS = 8
NAMED_IN_ERRORS = 3


def resolve_weights(
    where: str, family: Architecture, config: ModelConfig, checkpoint: Checkpoint
) -> dict[str, Weight]:
    """Find and check the stored tensor of every weight. Returns the weights by the engine's names.
    Raises if tensors are missing or unknown.
    """
    weights = _found(where, family.tensors(config), checkpoint)
    # A checkpoint whose LM head is tied may still store the head's matrix. This is not an error.
    specs = family.tensors(replace(config, tie_embeddings=False))
    known = {tensor.name for spec in specs for tensor in _find(spec, checkpoint)}
    ignored = _predictors(checkpoint)
    if ignored:
        log.warning("%s: layers that predict further tokens are not used", where)
    extra = [
        name
        for name in checkpoint.tensors
        if name not in known
        and not name.endswith(_IGNORED_SUFFIXES)
        and not name.startswith(ignored)
    ]
    if extra:
        raise ModelFormatError(
            f"{where}: a {config.family} model of {config.num_layers} layers has no place for "
            f"these tensors: {_some(extra)}"
        )
    return weights


def _found(where: str, specs: Iterable[TensorSpec], checkpoint: Checkpoint) -> dict[str, Weight]:
    """Find and check the stored tensors of the weights `specs`. Raises if some are missing."""
    weights: dict[str, Weight] = {}
    missing: list[str] = []
    for spec in specs:
        tensors = _find(spec, checkpoint)
        if not tensors:
            if not spec.optional:
                missing.append(spec.name)
            continue
        is_gguf = checkpoint.format == "gguf" and tensors[0].name != spec.older_gguf
        transform = spec.gguf_transform if is_gguf else spec.hf_transform
        if checkpoint.format == "safetensors" and tensors[0].is_gathered:
            # Quantized matrices have their rows in order, also if floats are stored transposed.
            transform = replace(transform, transposed=False)
        weights[spec.name] = Weight(spec, tensors, transform)
    if missing:
        raise ModelFormatError(f"{where}: weights are missing: {_some(missing)}")
    for weight in weights.values():
        _check_weight(where, weight)
    return weights


def resolve_vision(where: str, vision: VisionConfig, checkpoint: Checkpoint) -> dict[str, Weight]:
    weights = _found(where, vision_tensors(vision), checkpoint)
    known = {tensor.name for weight in weights.values() for tensor in weight.tensors}
    unknown = [
        name
        for name in checkpoint.tensors
        if name not in known and not name.startswith(UNUSED_PREFIX)
    ]
    if unknown:
        raise ModelFormatError(
            f"{where}: the image encoder has no place for these tensors: {_some(unknown)}"
        )
    return weights


def _predictors(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The prefixes of layers that only predict further tokens (multi-token prediction). They follow
    the layers of the model, which does not need them.
    """
    suffix = "eh_proj.weight"
    return tuple(
        name.removesuffix(suffix).removesuffix("nextn.")
        for name in checkpoint.tensors
        if name.endswith(suffix)
    )


def _find(spec: TensorSpec, checkpoint: Checkpoint) -> tuple[LazyTensor, ...]:
    """The stored tensors of a weight: none if the checkpoint lacks it, and one per expert if they
    are stored one by one. In checkpoints of a Hugging Face model without a head, the names lack the
    first component, so both names are tried.
    """
    stored = checkpoint.tensors
    name = spec.gguf if checkpoint.format == "gguf" else spec.hf
    if checkpoint.format == "gguf" and name not in stored and spec.older_gguf in stored:
        name = spec.older_gguf
    if name is None:
        return ()
    names = [name]
    if "{e}" in name:
        names = [name.replace("{e}", str(expert)) for expert in range(spec.shape[0])]
    if checkpoint.format != "gguf" and names[0] not in stored:
        names = [each.partition(".")[2] for each in names]
    found = tuple(stored[each] for each in names if each in stored)
    return found if len(found) == len(names) else ()


def _check_weight(where: str, weight: Weight) -> None:
    """Check a weight's shape and storage type."""
    expected = weight.stored_shape
    for tensor in weight.tensors:
        if tensor.shape != expected:
            raise ModelFormatError(
                f"{where}: tensor '{tensor.name}' has shape {list(tensor.shape)}, "
                f"the config asks for {list(expected)}"
            )
        if tensor.dtype not in TRAITS:
            raise ModelFormatError(
                f"{where}: tensor '{tensor.name}' has dtype {tensor.dtype}, which is not supported "
                f"(supported: {', '.join(TRAITS)})"
            )
        if tensor.dtype != weight.tensor.dtype:
            raise ModelFormatError(
                f"{where}: tensor '{tensor.name}' has dtype {tensor.dtype}, "
                f"but '{weight.tensor.name}' has {weight.tensor.dtype}"
            )
        if weight.transform.transposed and TRAITS[tensor.dtype].quantized:
            raise ModelFormatError(
                f"{where}: tensor '{tensor.name}' is transposed and has dtype {tensor.dtype}; "
                "only plain floats can be transposed"
            )


def check_values(where: str, weights: Mapping[str, Weight]) -> None:
    """Check that a sample of blocks from each tensor dequantizes to finite values."""
    tensors = {tensor.name: tensor for weight in weights.values() for tensor in weight.tensors}
    for tensor in tensors.values():
        traits = traits_of(tensor.dtype)
        blocks = tensor.sample(_SAMPLED_BLOCKS).reshape(-1, traits.block_bytes)
        sample = blocks[np.linspace(0, len(blocks) - 1, _SAMPLED_BLOCKS, dtype=np.intp)]
        values = dequantize(tensor.dtype, sample.reshape(-1), (len(sample), traits.block_elems))
        if not np.isfinite(values).all():
            raise ModelFormatError(
                f"{where}: tensor '{tensor.name}' holds NaN or infinite values; the file is damaged"
            )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    rest = len(listed) - NAMED_IN_ERRORS
    return ", ".join(listed[:NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")
