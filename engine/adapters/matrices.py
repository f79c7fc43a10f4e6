"""The low-rank matrices of an adapter, under the engine's names for weights.

Files name the modules of a Hugging Face model, or the tensors of a GGUF file. `fitted` finds the
weight of each, checks the shapes, and brings the rows into the engine's order, as weights of the
model itself are.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.architectures.tensors import TensorSpec, Transform
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture
from engine.weights.weight import stored_places

F32 = NDArray[np.float32]

EMBED, HEAD = "embed.weight", "head.weight"


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The change of one weight is b @ a. The adapter's scale is already part of b.

    For the table of token embeddings, a row of which is a token's vector, it is a.T @ b.T.
    """

    a: F32  # (rank, in); for embeddings (rank, vocabulary)
    b: F32  # (out, rank)

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that fits a model. `pairs` has the engine's names of weights. `whole` has
    matrices that replace those of the model: the table of embeddings, the head, or both.
    """

    pairs: Mapping[str, LoraPair]
    whole: Mapping[str, F32] = field(default_factory=dict)

    @property
    def max_rank(self) -> int:
        return max((pair.rank for pair in self.pairs.values()), default=0)

    @property
    def num_bytes(self) -> int:
        whole = sum(each.nbytes for each in self.whole.values())
        return whole + sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())

    @property
    def changes_head(self) -> bool:
        return HEAD in self.pairs or HEAD in self.whole

    @property
    def key(self) -> str:
        """A hash of everything that decides what the adapter computes."""
        digest = hashlib.blake2b(digest_size=16)  # a request may wait for it, so a fast hash
        for name in sorted(self.pairs):
            pair = self.pairs[name]
            digest.update(f"{name} {pair.a.shape} {pair.b.shape}".encode())
            digest.update(pair.a.data)
            digest.update(pair.b.data)
        for name in sorted(self.whole):
            digest.update(f"{name} {self.whole[name].shape}".encode())
            digest.update(self.whole[name].data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class StoredPair:
    """The two matrices as a file has them. `name` is the stored name of the weight they change."""

    name: str
    a: F32  # (rank, in); for embeddings (rank, vocabulary)
    b: F32  # (out, rank)
    scale: float


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as its files have it. `where` is its name, for errors."""

    where: str
    file_format: str  # "gguf" or "safetensors"
    pairs: tuple[StoredPair, ...]
    made_for: str | None = None  # the architecture of its base model, if the files say it
    whole: Mapping[str, F32] = field(default_factory=dict)  # by the stored name of the weight


def fitted(stored: StoredAdapter, config: ModelConfig, max_rank: int) -> Adapter:
    """Check that the matrices fit the model, and return them under the engine's names."""
    where, file_format = stored.where, stored.file_format
    if stored.made_for not in (None, *architecture(config.family).gguf_names):
        raise ModelFormatError(
            f"{where}: the adapter was made for a {stored.made_for} model, this is a "
            f"{config.family} model"
        )
    places = _places(config, file_format)
    pairs: dict[str, LoraPair] = {}
    for pair in stored.pairs:
        specs = places.get(pair.name) or places.get(f"transformer.{pair.name}")
        if not specs:
            raise ModelFormatError(
                f"{where}: the adapter changes '{pair.name}', which this {config.family} model of "
                f"{config.num_layers} layers does not have; it was made for another base model"
            )
        _check_rank(where, pair, max_rank)
        for spec in specs:
            transform = spec.gguf_transform if file_format == "gguf" else spec.hf_transform
            pairs[spec.name] = _pair(where, config, spec, transform, pair)
    whole = dict(_whole(stored, config, places))
    return Adapter(pairs, whole)


def _whole(
    stored: StoredAdapter, config: ModelConfig, places: Mapping[str, list[TensorSpec]]
) -> Iterator[tuple[str, F32]]:
    for name, values in stored.whole.items():
        specs = places.get(name) or places.get(f"transformer.{name}") or ()
        served = [spec for spec in specs if spec.name in (EMBED, HEAD)]
        if not served:
            raise ModelFormatError(
                f"{stored.where}: modules_to_save has '{name}'; of modules that are saved whole, "
                "only the embeddings and the head are served"
            )
        expected = (config.vocab_size, config.hidden_size)
        if values.shape != expected:
            raise ModelFormatError(
                f"{stored.where}: '{name}' is {' x '.join(map(str, values.shape))}, the model has "
                f"{expected[0]} x {expected[1]}; it was made for another base model"
            )
        for spec in served:
            yield spec.name, np.ascontiguousarray(values, np.float32)


def _places(config: ModelConfig, file_format: str) -> dict[str, list[TensorSpec]]:
    """The weights that each stored tensor has, by the tensor's name. The head has its own place,
    even if it shares its matrix with the embeddings.
    """
    places: dict[str, list[TensorSpec]] = {}
    for spec in _specs(config):
        name = spec.gguf if file_format == "gguf" else spec.hf
        if name is not None and len(spec.shape) >= 2:
            for each in _with_experts(name, spec):
                places.setdefault(each, []).append(spec)
    return places


def _specs(config: ModelConfig) -> Iterator[TensorSpec]:
    family = architecture(config.family)
    yield from family.tensors(replace(config, tie_embeddings=False))


def _with_experts(name: str, spec: TensorSpec) -> Iterator[str]:
    if "{e}" not in name:
        yield name
        return
    for expert in range(spec.shape[0]):
        yield name.replace("{e}", str(expert))


def _check_rank(where: str, pair: StoredPair, max_rank: int) -> None:
    rank = len(pair.a)
    if rank != pair.b.shape[1] or not rank >= 1:
        raise ModelFormatError(
            f"{where}: the two matrices for '{pair.name}' have ranks {rank} and {pair.b.shape[1]}"
        )
    if rank > max_rank:
        raise ModelFormatError(
            f"{where}: rank {rank} of '{pair.name}' is above the limit of {max_rank}; raise "
            "performance.max_adapter_rank"
        )


def _pair(
    where: str, config: ModelConfig, spec: TensorSpec, transform: Transform, pair: StoredPair
) -> LoraPair:
    if spec.of_experts or transform.turned or transform.reshaped:
        kind = "experts" if "experts" in spec.name else "a matrix per head or a convolution"
        raise ModelFormatError(
            f"{where}: the adapter changes '{pair.name}', which is {kind}; such adapters are not "
            "served, merge it into the model: engine convert --merge"
        )
    if spec.name == EMBED:
        expected = (config.hidden_size, config.vocab_size)
    else:
        rows = spec.shape[0] + transform.groups * (transform.before + transform.after)
        expected = (rows, spec.shape[1])
    found = (len(pair.b), pair.a.shape[1])
    if found != expected:
        raise ModelFormatError(
            f"{where}: the adapter's matrices for '{pair.name}' make {found[0]} x {found[1]}, the "
            f"model has {expected[0]} x {expected[1]}; it was made for another base model"
        )
    b = pair.b
    if spec.name != EMBED and (transform.before or transform.after or transform.paired):
        b = b[stored_places(transform, spec.shape[0])]
    return LoraPair(
        np.ascontiguousarray(pair.a, np.float32),
        np.ascontiguousarray(b * np.float32(pair.scale), np.float32),
    )
