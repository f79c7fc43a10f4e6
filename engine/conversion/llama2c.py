"""Reads and writes llama2.c models. A model file has seven integers, then float32 weights. The
tokenizer is a separate file.

A model is opened as if it were GGUF, because GGUF has the same weight layout: the two rows of each
RoPE pair are adjacent. Some values are not in the file but fixed in llama2.c's code: RoPE theta
(10,000), the epsilon of norms (1e-5), and the token ids for unknown, begin and end. Only the first
file version is supported. Later versions start with a magic number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from engine.architectures.base import ModelConfig, RopeConfig
from engine.architectures.export import gguf_metadata
from engine.architectures.llama import LLAMA
from engine.architectures.tensors import TensorSpec
from engine.conversion.stored import Bytes, TargetTensor, stored_weight
from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer_gguf import BYTE, CONTROL, NORMAL, UNKNOWN
from engine.core.text.tokenizer_to_gguf import PREFIX
from engine.ir.rotary import rotary_tables
from engine.weights.files import FileBytes
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import ModelSource
from engine.weights.quants import dequantize
from engine.weights.weight import Weight

_HEADER = Struct("<7i")  # D, F, layers, N, K, V, positions; V is negative if the head is not tied
_LATER_MAGIC = 0x616B3432
_THETA, _EPS = 10_000.0, 1e-5
BOS_ID, EOS_ID = 1, 2
# The engine's weight names in the order of the file. For each name in `_LAYERS`, the weights of all
# layers follow each other.
_TABLES = ("embed.weight",)
_LAYERS = (
    *("attn_norm.weight", "attn.q.weight", "attn.k.weight", "attn.v.weight", "attn.o.weight"),
    *("mlp_norm.weight", "mlp.gate.weight", "mlp.down.weight", "mlp.up.weight"),
)


@dataclass(frozen=True, slots=True)
class Llama2cCheckpoint:
    file: FileBytes
    tensors: dict[str, LazyTensor]
    format: str = "gguf"  # the tensors have the names and the layout that they have in GGUF

    @property
    def files(self) -> list[FileBytes]:
        return [self.file]

    def close(self) -> None:
        self.file.close()


def open_llama2c(path: Path, tokenizer: Mapping[str, Any]) -> ModelSource:
    """Open a llama2.c model. `tokenizer` is GGUF metadata, as `read_tokenizer` returns it."""
    file = FileBytes(path, use_mmap=True)
    config = _read_config(file)
    tensors: dict[str, LazyTensor] = {}
    weights: dict[str, Weight] = {}
    position = _HEADER.size
    for spec in file_order(config):
        assert spec.gguf is not None, spec
        num_bytes = 4 * prod(spec.shape)
        tensor = LazyTensor(
            name=spec.gguf,
            shape=spec.shape,
            dtype="F32",
            nbytes=num_bytes,
            _view=partial(file.view, position, num_bytes),
            _dequantize=partial(dequantize, "F32"),
        )
        position += num_bytes
        if spec.name == "norm.weight":
            # Skip the file's tables of RoPE cosines and sines.
            position += 4 * config.max_position * config.head_dim
        tensors[spec.gguf] = tensor
        weights[spec.name] = Weight(spec, (tensor,), spec.gguf_transform)
    if position != file.size:
        raise ModelFormatError(
            f"{path.name}: {file.size} bytes, but its header describes {position}; it is not a "
            "llama2.c model of the first format, or not all of one"
        )
    metadata = gguf_metadata(config) | {"general.name": path.stem} | dict(tokenizer)
    return ModelSource(path, config, Llama2cCheckpoint(file, tensors), weights, metadata)


def llama2c_bytes(source: ModelSource) -> Iterator[Bytes]:
    """Yields the content of a llama2.c file, in chunks."""
    config = source.config
    _check_expressible(config)
    vocab = config.vocab_size if config.tie_embeddings else -config.vocab_size
    sizes = (config.hidden_size, config.intermediate_size, config.num_layers)
    heads = (config.num_heads, config.num_kv_heads)
    head = _HEADER.pack(*sizes, *heads, vocab, config.max_position)
    yield np.frombuffer(head, np.uint8)
    for spec in file_order(config):
        yield from _stored(source, spec).pieces()
        if spec.name == "norm.weight":
            assert config.rope is not None, config
            for table in rotary_tables(config.rope, config.max_position):
                yield table.astype("<f4").reshape(-1).view(np.uint8)


def llama2c_size(source: ModelSource) -> int:
    return 4 * sum(prod(weight.spec.shape) for weight in source.weights.values())


def file_order(config: ModelConfig) -> Sequence[TensorSpec]:
    specs = {spec.name: spec for spec in LLAMA.tensors(config)}
    layers = [f"layers.{i}.{name}" for name in _LAYERS for i in range(config.num_layers)]
    head = () if config.tie_embeddings else ("head.weight",)
    return [specs[name] for name in (*_TABLES, *layers, "norm.weight", *head)]


def _stored(source: ModelSource, spec: TensorSpec) -> TargetTensor:
    return stored_weight(source.weights[spec.name], spec.name, spec.gguf_transform, "F32")


def _read_config(file: FileBytes) -> ModelConfig:
    if file.size < _HEADER.size:
        raise ModelFormatError(f"{file.path.name}: too short for a llama2.c model")
    numbers = _HEADER.unpack(file.view(0, _HEADER.size).tobytes())
    if numbers[0] == _LATER_MAGIC:
        raise ModelFormatError(
            f"{file.path.name} is a later llama2.c format; export it with --version 0"
        )
    hidden, inner, layers, heads, kv_heads, vocab, positions = numbers
    plausible = all(0 < number < 2**24 for number in (*numbers[:5], abs(vocab), positions))
    if not plausible or hidden % heads or heads % kv_heads or layers > 1024:
        raise ModelFormatError(
            f"{file.path.name} does not start with the header of a llama2.c model; "
            "of .bin files, only those are read"
        )
    head_dim = hidden // heads
    return ModelConfig(
        family="llama",
        vocab_size=abs(vocab),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        max_position=positions,
        norm_eps=_EPS,
        tie_embeddings=vocab > 0,
        rope=RopeConfig(_THETA, head_dim),
        bos_id=BOS_ID,
        eos_ids=(EOS_ID,),
    )


def _check_expressible(config: ModelConfig) -> None:
    rules = {
        "its family must be llama": config.family == "llama",
        "it must have no biases": not (config.qkv_bias or config.out_bias or config.mlp_bias),
        "it must have no sliding window": config.sliding_window is None,
        f"its rotation must be the plain one of theta {_THETA:,.0f}": config.rope
        == RopeConfig(_THETA, config.head_dim),
        f"its norms must use an epsilon of {_EPS}": abs(config.norm_eps / _EPS - 1) < 1e-3,
        "its heads together must be as wide as its states": config.num_heads * config.head_dim
        == config.hidden_size,
        "its activation must be silu": config.activation == "silu",
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ModelFormatError(
            f"llama2.c cannot run this model: {'; '.join(broken)}. Choose GGUF or safetensors"
        )


_LENGTH = Struct("<i")
_PIECE = Struct("<fi")
_MAX_PIECE_BYTES = 4096
_FIRST_BYTE = 3  # byte tokens have ids 3 .. 258
_NAMES = {0: "<unk>", BOS_ID: "<s>", EOS_ID: "</s>"}


def read_tokenizer(path: Path, vocab_size: int) -> dict[str, Any]:
    """Read a tokenizer.bin. Returns the tokenizer as `tokenizer.*` keys of GGUF metadata."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelFormatError(
            f"cannot read {path}: {error.strerror or error}; a llama2.c model needs its "
            "tokenizer.bin beside it, or name one with --tokenizer"
        ) from error
    pieces: list[str] = []
    scores: list[float] = []
    for score, raw in _entries(content, path.name):
        pieces.append(_spelled(len(pieces), raw, path.name))
        scores.append(score)
    if len(pieces) != vocab_size:
        raise ModelFormatError(
            f"{path.name} holds {len(pieces)} pieces, the model has {vocab_size}; "
            "name the tokenizer that belongs to it with --tokenizer"
        )
    types = np.full(vocab_size, NORMAL, np.int32)
    types[_FIRST_BYTE : _FIRST_BYTE + 256] = BYTE
    types[[0, BOS_ID, EOS_ID]] = UNKNOWN, CONTROL, CONTROL
    keys = {
        "model": "llama",
        "tokens": pieces,
        "scores": np.array(scores, np.float32),
        "token_type": types,
        "unknown_token_id": 0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": True,
    }
    return {PREFIX + key: value for key, value in keys.items()}


def tokenizer_bytes(metadata: Mapping[str, Any]) -> bytes:
    """The content of a tokenizer.bin, made from the `tokenizer.*` keys of GGUF metadata."""
    pieces: Sequence[str] = metadata[f"{PREFIX}tokens"]
    types = metadata.get(f"{PREFIX}token_type")
    expected = [
        metadata.get(f"{PREFIX}model") == "llama",
        metadata.get(f"{PREFIX}bos_token_id") == BOS_ID,
        metadata.get(f"{PREFIX}eos_token_id") == EOS_ID,
        types is not None and bool((types[_FIRST_BYTE : _FIRST_BYTE + 256] == BYTE).all()),
    ]
    if not all(expected):
        raise ModelFormatError(
            "llama2.c reads SentencePiece vocabularies in Llama 2's order only (<unk>, <s>, </s>, "
            "256 bytes, then pieces), and this model has another; choose GGUF or safetensors"
        )
    marked = {BOS_ID: "\n<s>\n", EOS_ID: "\n</s>\n"}
    spelled = [marked.get(i, p).replace("▁", " ").encode() for i, p in enumerate(pieces)]
    scores = metadata[f"{PREFIX}scores"]
    records = [
        _PIECE.pack(score, len(raw)) + raw for raw, score in zip(spelled, scores, strict=True)
    ]
    return _LENGTH.pack(max(map(len, spelled))) + b"".join(records)


def _entries(content: bytes, where: str) -> Iterator[tuple[float, bytes]]:
    position = _LENGTH.size
    while position < len(content):
        start = position + _PIECE.size
        score, length = (
            _PIECE.unpack_from(content, position) if start <= len(content) else (0.0, -1)
        )
        if not 0 <= length <= _MAX_PIECE_BYTES or start + length > len(content):
            raise ModelFormatError(f"{where} is not a tokenizer of llama2.c, or not all of one")
        yield score, content[start : start + length]
        position = start + length


def _spelled(index: int, raw: bytes, where: str) -> str:
    if index in _NAMES:
        return _NAMES[index]
    byte = index - _FIRST_BYTE
    if 0 <= byte < 256:
        return f"<0x{byte:02X}>"
    try:
        return raw.decode().replace(" ", "▁")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{where}: piece {index} is not valid UTF-8") from error
