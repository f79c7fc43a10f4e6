"""Damaged GGUF files: valid ones of several families are parsed, changed in sensitive places and
written again, or their raw bytes are mutated.
"""

import itertools
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

from engine.architectures import export
from engine.architectures.base import ModelConfig
from tests.scoreboard.mutations.bytes import EDGES, damaged
from tests.scoreboard.mutations.models import FAMILIES
from tests.scoreboard.mutations.reading import read_model as read
from tests.security.requests.test_jinja import BOMBS
from tests.support.files import gguf_files, tokenizer_files
from tests.support.files.gguf_files import ARRAY, STRING, text, u32, u64

__all__ = ["read", "sound_files", "write"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q"}
_NUMBERS[12] = "d"
_FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    *(b"", b"\0", b"a" * 70_000, b"\xff\xfe", b"\xed\xa0\x80", "é\u2028🙂".encode(), b"../../x"),
    *(b"gpt2", b"llama", b"bert", b"qwen3", b"default", b"<s>", b"{{ messages }}", b"{% for"),
    *(bomb.encode() for bomb in BOMBS.values() if len(bomb) < 1000),
)
_ALIGNMENT = 32
_END_OF_TURN = {"tokenizer.ggml.eot_token_id": 2}
# llama.cpp stores only activations as these two.
_BLOCK_TYPES = [
    kind
    for kind, (length, _) in GGML_QUANT_SIZES.items()
    if length > 1 and kind not in (GGMLQuantizationType.Q8_1, GGMLQuantizationType.Q8_K)
]


@dataclass
class Entry:
    key: bytes
    kind: int
    value: Any  # a number, bytes, or a list of these for an array
    element_kind: int = 0
    stated: int | None = None  # a wrong count, on purpose

    def encode(self) -> bytes:
        if self.kind != ARRAY:
            return text(self.key) + u32(self.kind) + _scalar(self.kind, self.value)
        count = len(self.value) if self.stated is None else self.stated
        head = text(self.key) + u32(ARRAY) + u32(self.element_kind) + u64(count)
        return head + b"".join(_scalar(self.element_kind, each) for each in self.value)


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    offset: int

    def encode(self) -> bytes:
        dims = b"".join(u64(dim % 2**64) for dim in self.dims)
        place = u32(self.kind % 2**32) + u64(self.offset % 2**64)
        return text(self.name) + u32(len(self.dims)) + dims + place


@dataclass
class Draft:
    entries: list[Entry]
    tensors: list[Tensor]
    data: bytes
    head: dict[str, int] = field(default_factory=dict)

    def encode(self) -> tuple[bytes, int]:
        """The file's bytes, and the offset of its data."""
        content = gguf_files.assemble(
            [each.encode() for each in self.entries],
            [each.encode() for each in self.tensors],
            alignment=_ALIGNMENT,
            **self.head,
        )
        return content + self.data, len(content)


def _scalar(kind: int, value: Any) -> bytes:
    """Encode any value as this kind."""
    if kind == STRING:
        return text(value if isinstance(value, bytes) else str(value).encode())
    code = _NUMBERS.get(kind, "I")
    if isinstance(value, bytes):
        value = len(value)
    if code in "fd":
        try:
            return struct.pack(f"<{code}", value)
        except OverflowError:
            return struct.pack(f"<{code}", float("inf"))
    size = struct.calcsize(code)
    whole = int(value) if np.isfinite(float(value)) else 0
    return (whole % 2 ** (8 * size)).to_bytes(size, "little")


@cache
def _sound() -> tuple[bytes, ...]:
    bpe, pieces = tokenizer_files.byte_level_metadata(), tokenizer_files.sentencepiece_metadata()
    unigram, words = tokenizer_files.unigram_metadata(), tokenizer_files.word_piece_metadata()
    # A unit test damages the map, which would make each file a megabyte larger.
    del unigram["tokenizer.ggml.precompiled_charsmap"]
    made = []
    with TemporaryDirectory() as folder:
        for family, vocabulary in (
            ("llama", pieces),
            ("qwen2", bpe),
            ("gpt2", bpe),
            ("qwen3", bpe),
            ("llama", unigram),
            ("llama", words),
        ):
            path = Path(folder, f"{family}.gguf")
            size = len(vocabulary["tokenizer.ggml.tokens"])
            config = gguf_files.tiny_config(family, vocab_size=size, num_layers=1)
            stored = gguf_files.gguf_layout(config, gguf_files.random_weights(config))
            gguf_files.write_gguf(path, config, stored, vocabulary | _END_OF_TURN)
            made.append(path.read_bytes())
        for config in FAMILIES.values():
            made.append(_quantized(Path(folder, "quantized.gguf"), config, bpe | _END_OF_TURN))
    return tuple(made)


def _quantized(path: Path, config: ModelConfig, vocabulary: dict[str, Any]) -> bytes:
    """A file of this family, whose matrices have different block types."""
    types = itertools.cycle(_BLOCK_TYPES)
    stored: dict[str, Any] = gguf_files.gguf_layout(config, gguf_files.random_weights(config))
    chosen = {}
    for name, values in stored.items():
        if values.ndim > 1 and values.shape[-1] % 256 == 0:
            chosen[name] = next(types)
            length, size = GGML_QUANT_SIZES[chosen[name]]
            shape = (*values.shape[:-1], values.shape[-1] // length * size)
            stored[name] = np.zeros(shape, np.uint8)
    path.unlink(missing_ok=True)
    extra = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in (export.gguf_metadata(config) | vocabulary).items()
        if key != "general.architecture"  # the writer adds it
    }
    gguf_files.write_gguf(path, config, stored, extra, types=chosen)
    return path.read_bytes()


def sound_files(folder: Path) -> Iterator[Path]:
    for content in _sound():
        path = folder / "sound.gguf"
        path.write_bytes(content)
        yield path


@cache
def _content(index: int) -> tuple[Any, ...]:
    """A valid file, parsed by another library."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        path.write_bytes(_sound()[index])
        reader = GGUFReader(path)
        fields = [
            (name, *map(int, each.types[:2]), _plain(each.contents()))
            for name, each in reader.fields.items()
            if not name.startswith("GGUF.")
        ]
        tensors = [
            (each.name, list(map(int, each.shape)), int(each.tensor_type), each.data_offset)
            for each in reader.tensors
        ]
        return fields, tensors, path.read_bytes()[reader.data_offset :], reader.data_offset


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _draft(index: int) -> Draft:
    fields, tensors, data, start = _content(index)
    entries = []
    for name, kind, *element_kind, value in fields:
        copied = list(value) if isinstance(value, list) else value
        entries.append(Entry(name.encode(), kind, copied, *element_kind))
    placed = [Tensor(name.encode(), [*dims], kind, at - start) for name, dims, kind, at in tensors]
    return Draft(entries, placed, data)


def write(seed: int, folder: Path) -> Path:
    rng = random.Random(seed)
    index = rng.randrange(len(_sound()))
    way = rng.random()
    if way < 0.35:
        content = damaged(rng, _sound()[index], _content(index)[3])
    else:
        draft = _draft(index)
        for _ in range(rng.choice((1, 1, 2, 3))):
            rng.choice(_CHANGES)(rng, draft)
        content, header = draft.encode()
        if way > 0.85:
            content = damaged(rng, content, header)
    path = folder / "damaged.gguf"
    path.write_bytes(content)
    return path


def _edge(rng: random.Random, value: Any = None) -> Any:
    if isinstance(value, bytes) or value is None and rng.random() < 0.3:
        return rng.choice(_TEXTS)
    if isinstance(value, float):
        return rng.choice(_FLOATS)
    near = int(value or 0) + rng.choice((-1, 1, 32))
    return rng.choice((*EDGES, near, near, near, -1, -(2**31)))


def _entry(rng: random.Random, draft: Draft) -> Entry:
    """A random entry, mostly of those that the engine reads, including arrays."""
    if not draft.entries:
        draft.entries.append(Entry(b"general.name", STRING, b"x"))
    return rng.choice(draft.entries)


def _change_value(rng: random.Random, draft: Draft) -> None:
    entry = _entry(rng, draft)
    if entry.kind != ARRAY:
        entry.value = _edge(rng, entry.value)
    elif entry.value:
        for _ in range(rng.choice((1, 1, 5))):
            at = rng.randrange(len(entry.value))
            entry.value[at] = _edge(rng, entry.value[at])


def _change_kind(rng: random.Random, draft: Draft) -> None:
    entry = _entry(rng, draft)
    if entry.kind == ARRAY:
        entry.element_kind = rng.choice((*_NUMBERS, STRING, ARRAY, 13, 2**31))
    else:
        entry.kind = rng.choice((*_NUMBERS, STRING, 13, 2**31))


def _replace_by_array(rng: random.Random, draft: Draft) -> None:
    entry = _entry(rng, draft)
    entry.kind, entry.element_kind = ARRAY, rng.choice((*_NUMBERS, STRING))
    entry.value = [_edge(rng) for _ in range(rng.choice((0, 1, 3, 40)))]


def _change_length(rng: random.Random, draft: Draft) -> None:
    arrays = [entry for entry in draft.entries if entry.kind == ARRAY]
    if not arrays:
        return
    entry = rng.choice(arrays)
    match rng.randrange(5):
        case 0:
            entry.stated = rng.choice((*EDGES, len(entry.value) - 1, len(entry.value) + 1))
        case 1:
            del entry.value[rng.randrange(len(entry.value) + 1) :]
        case 2:
            entry.value *= rng.choice((2, 2, 50))
        case 3:
            entry.value += entry.value[-1:]
        case 4:
            rng.shuffle(entry.value)


def _rearrange_entries(rng: random.Random, draft: Draft) -> None:
    entry, other = _entry(rng, draft), _entry(rng, draft)
    match rng.randrange(5):
        case 0:
            draft.entries.remove(entry)
        case 1:
            draft.entries.append(entry)
        case 2:
            entry.key = rng.choice(
                (b"", b"x", other.key, b"\xff", b"k" * 65_536, entry.key + b"\0")
            )
        case 3:
            entry.kind, other.kind = other.kind, entry.kind
            entry.value, other.value = other.value, entry.value
            entry.element_kind, other.element_kind = other.element_kind, entry.element_kind
        case 4:
            draft.entries += [Entry(b"k%d" % n, 4, n) for n in range(rng.choice((1, 5000)))]


def _change_alignment(rng: random.Random, draft: Draft) -> None:
    value = rng.choice((*EDGES, 8, 16, 32, 64, 4096))
    draft.entries.append(Entry(b"general.alignment", rng.choice((4, 4, 10, STRING)), value))


def _tensor(rng: random.Random, draft: Draft) -> Tensor:
    if not draft.tensors:
        draft.tensors.append(Tensor(b"output_norm.weight", [64], 0, 0))
    return rng.choice(draft.tensors)


def _change_tensor(rng: random.Random, draft: Draft) -> None:
    tensor = _tensor(rng, draft)
    match rng.randrange(6):
        case 0:
            at = rng.randrange(len(tensor.dims)) if tensor.dims else 0
            tensor.dims[at : at + 1] = [_edge(rng, (tensor.dims or [1])[0])]
        case 1:
            tensor.dims = tensor.dims[::-1] * rng.choice((0, 1, 1, 2, 3))
        case 2:
            tensor.kind = rng.choice((*range(40), 2**31))
        case 3:
            tensor.offset = rng.choice((*EDGES, tensor.offset + 32, tensor.offset - 32, -32))
        case 4:
            tensor.name = rng.choice((b"", b"\xff", b"n" * 63, b"n" * 64, _tensor(rng, draft).name))
        case 5:
            tensor.dims = [2 ** rng.randrange(31) for _ in range(rng.randrange(1, 5))]


def _rearrange_tensors(rng: random.Random, draft: Draft) -> None:
    tensor, other = _tensor(rng, draft), _tensor(rng, draft)
    match rng.randrange(4):
        case 0:
            draft.tensors.remove(tensor)
        case 1:
            draft.tensors.append(tensor)
        case 2:
            tensor.offset, other.offset = other.offset, tensor.offset
        case 3:
            draft.tensors += [
                Tensor(b"extra%d" % n, [32], 0, 0) for n in range(rng.choice((1, 5000)))
            ]


def _change_data(rng: random.Random, draft: Draft) -> None:
    match rng.randrange(4):
        case 0:
            draft.data = draft.data[: rng.randrange(len(draft.data) + 1)]
        case 1:
            draft.data += rng.randbytes(rng.choice((1, 32, 10_000)))
        case 2:
            draft.data = b"\xff" * len(draft.data)
        case 3:
            at = 4 * rng.randrange(len(draft.data) // 4 + 1)
            draft.data = draft.data[:at] + struct.pack("<f", float("nan")) + draft.data[at + 4 :]


def _change_head(rng: random.Random, draft: Draft) -> None:
    name = rng.choice(("version", "num_tensors", "num_entries"))
    value = rng.choice((*EDGES, len(draft.tensors) + rng.choice((-1, 1))))
    draft.head[name] = max(value, 0) % (2**32 if name == "version" else 2**64)


Change = Callable[[random.Random, Draft], None]
_CHANGES: tuple[Change, ...] = (
    *(_change_value, _change_value, _change_value, _change_kind, _replace_by_array),
    *(_change_length, _change_length, _rearrange_entries, _change_alignment, _change_tensor),
    *(_change_tensor, _rearrange_tensors, _change_data, _change_head),
)
assert set(_NUMBERS) | {STRING, ARRAY} == {int(kind) for kind in GGUFValueType}
