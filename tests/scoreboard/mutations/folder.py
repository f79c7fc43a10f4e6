"""Damaged model folders: safetensors, their index, configuration, tokenizer and other small files.

One or two files of a valid folder are mutated, either within their format or as raw bytes.
"""

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.architectures import export
from engine.architectures.base import ModelConfig
from tests.scoreboard.mutations.bytes import EDGES, damaged
from tests.scoreboard.mutations.json import JUNK, damage
from tests.scoreboard.mutations.models import FAMILIES
from tests.scoreboard.mutations.reading import read_model as read
from tests.security.files import test_schemes
from tests.security.requests.test_jinja import BOMBS
from tests.support.files import checkpoint_folders, safetensors_files, tokenizer_files
from tests.support.files.gguf_files import random_weights, tiny_config
from tests.support.files.safetensors_files import assemble, file_bytes, hf_layout
from tests.unit.core.text import test_encoder_tokenizer
from tests.unit.core.text.test_tokenizer_mutations import JUNK as TOKENIZER_JUNK
from tests.unit.weights import test_encoder_files

__all__ = ["read", "sound_files", "write"]

Files = dict[str, bytes]
WEIGHTS = "model.safetensors"
_HEADER_JUNK = (*JUNK, *EDGES, "F32", "F16", "BF16", "F64", "I64", "U8", "F4", [0], [0, 0])
_TEMPLATES = [bomb.encode() for bomb in BOMBS.values() if len(bomb) < 1000]
_changed: set[Path] = set()  # files that the previous case left damaged


def _byte_level(folder: Path) -> None:
    checkpoint_folders.write_hf(folder, "llama", num_layers=1)


def _in_shards(folder: Path) -> None:
    """Split the weights into two files with an index, and move the template to its own file."""
    checkpoint_folders.write_hf(folder, "qwen3", num_layers=1)
    tensors = _tensors(tiny_config("qwen3", num_layers=1, vocab_size=_vocab_size(folder)))
    half = len(tensors) // 2
    shards = {"one.safetensors": dict(list(tensors.items())[:half])}
    shards["two.safetensors"] = dict(list(tensors.items())[half:])
    for name, stored in shards.items():
        (folder / name).write_bytes(file_bytes(stored))
    places = {tensor: name for name, stored in shards.items() for tensor in stored}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / WEIGHTS).unlink()
    (folder / "chat_template.jinja").write_text(tokenizer_files.TEMPLATE)


def _unigram(folder: Path) -> None:
    engine = tokenizers.Tokenizer(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    engine.train_from_iterator(
        tokenizer_files.CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    config = tiny_config("qwen2", num_layers=1, vocab_size=engine.get_vocab_size())
    safetensors_files.write_model(folder, config, _tensors(config))


def _tekken(folder: Path) -> None:
    tokenizer_files.write_tekken(folder, r"\s+|\S+")
    size = 30 + len(tokenizer_files.ranked_tokens())
    config = tiny_config("llama", num_layers=1, vocab_size=size)
    safetensors_files.write_model(folder, config, _tensors(config))


def _encoder(folder: Path) -> None:
    config = test_encoder_files.config_of()
    (folder / "config.json").write_text(json.dumps(test_encoder_files.CONFIG))
    (folder / WEIGHTS).write_bytes(file_bytes(_tensors(config)))
    test_encoder_tokenizer.write(folder)
    test_encoder_files.write(folder, pooling_mode="cls")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')


def _family(folder: Path, name: str) -> None:
    tokenizer_files.write_directory(folder)
    config = FAMILIES[name]
    (folder / "config.json").write_text(json.dumps(export.hf_config(config, "float32")))
    (folder / WEIGHTS).write_bytes(file_bytes(_tensors(config)))


def _quantized(folder: Path, case: str) -> None:
    """Store the keys and values of the first layer as this scheme's own library stores them."""
    checkpoint_folders.write_hf(folder, "llama", num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"quantization_config": test_schemes.CASES[case]["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(config | scheme))
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), b""
    header.pop("__metadata__", None)
    for name, entry in list(header.items()):
        matrix = name.removesuffix(".weight")
        parts = {name: (entry["dtype"], entry["shape"], _stored(content, length, entry))}
        if matrix.endswith(("k_proj", "v_proj")):
            sound = test_schemes.sound(case)
            parts = {part.replace("m.", f"{matrix}.", 1): each for part, each in sound.items()}
        del header[name]
        for part, (dtype, shape, raw) in parts.items():
            offsets = [len(data), len(data) + len(raw)]
            header[part] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += raw
    (folder / WEIGHTS).write_bytes(assemble(header, data))


def _stored(content: bytes, length: int, entry: dict[str, Any]) -> bytes:
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    return content[start:end]


_SCHEMES = (
    *("gptq-act-order", "awq", "ct-int4-asym", "ct-nvfp4"),
    *("ct-fp8-channel", "fp8-block", "bnb-nf4-nested", "bnb-int8"),
)


def _tensors(config: ModelConfig) -> safetensors_files.Arrays:
    return hf_layout(config, random_weights(config))


def _vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


@cache
def _sound() -> tuple[Files, ...]:
    made = []
    schemes = [partial(_quantized, case=case) for case in _SCHEMES]
    families = [partial(_family, name=name) for name in FAMILIES]
    plain = [_byte_level, _in_shards, _unigram, _encoder, _tekken]
    for build in (*plain, *schemes, *families):
        with TemporaryDirectory() as place:
            folder = Path(place)
            build(folder)
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            made.append({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    return tuple(made)


def sound_files(folder: Path) -> Iterator[Path]:
    for number, files in enumerate(_sound()):
        for name, content in files.items():
            path = folder / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield folder / str(number)


def write(seed: int, folder: Path) -> Path:
    """Damage one of the valid folders that `sound_files` wrote. The others stay intact."""
    for path in _changed:
        number, _, name = path.relative_to(folder).as_posix().partition("/")
        if name in _sound()[int(number)]:
            path.write_bytes(_sound()[int(number)][name])
        else:
            path.unlink(missing_ok=True)
    _changed.clear()
    rng = random.Random(seed)
    number = rng.randrange(len(_sound()))
    files = _sound()[number]
    for name in rng.sample(list(files), rng.choice((1, 1, 1, 2))):
        path = folder / str(number) / name
        _changed.add(path)
        content = _damaged_file(rng, name, files[name])
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    return folder / str(number)


def _damaged_file(rng: random.Random, name: str, content: bytes) -> bytes | None:
    way = rng.random()
    if way < 0.02:
        return None
    if way < 0.06:  # another model's file of the same name, if there is one
        return rng.choice([files.get(name, content) for files in _sound()])
    if way < 0.3:
        return damaged(rng, content, min(len(content), 4096))
    if name.endswith(".safetensors"):
        return _damaged_weights(rng, content)
    if name.endswith(".jinja"):
        return rng.choice((*_TEMPLATES, b"\xff\xfe", b"{{" * 20_000, b"x" * 300_000))
    if way < 0.34:
        return rng.choice(_STRANGE)
    junk = (*JUNK, *TOKENIZER_JUNK) if name == "tokenizer.json" else JUNK
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        damage(rng, value, junk)
    return json.dumps(value).encode()


_STRANGE = (
    *(b"", b"null", b"[]", b"{}", b'"x"', b"{" * 100_000, b"[" * 100_000, b'{"a":' * 100_000),
    *(b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}", b'{"a": ' + b"9" * 5000 + b"}", b"\x80\x04\x95" * 9),
)


def _damaged_weights(rng: random.Random, content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(rng.choice((1, 1, 2, 3))):
        header, data = rng.choice(_CHANGES)(rng, header, data)
    stated = None
    if rng.random() < 0.1:
        stated = rng.choice((*EDGES, length - 1, length + 1))
    return assemble(header, data, stated)


Header = dict[str, Any]


def _change_header(rng: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    changed = copy.deepcopy(header)
    damage(rng, changed, _HEADER_JUNK)
    return changed, data


def _change_entry(rng: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    names = [name for name, entry in header.items() if isinstance(entry, dict)]
    if not names:
        return header, data
    name = rng.choice(names)
    entry = dict(header[name])
    match rng.randrange(4):
        case 0:
            entry["dtype"] = rng.choice(("F16", "BF16", "F64", "I8", "F4", "F8_E4M3", "C64", "X"))
        case 1:
            entry["shape"] = [2 ** rng.randrange(40) for _ in range(rng.randrange(10))]
        case 2:
            begin, end = rng.choice(EDGES), rng.choice(EDGES)
            entry["data_offsets"] = [begin, end]
        case 3:
            shape = entry.get("shape")
            entry["shape"] = shape[::-1] if isinstance(shape, list) else [1]
    return header | {name: entry}, data


def _rename(rng: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    """Give one tensor another's name, duplicate tensors, or remove some."""
    names = list(header)
    if not names:
        return header, data
    name, other = rng.choice(names), rng.choice(names)
    match rng.randrange(3):
        case 0:
            return {key: value for key, value in header.items() if key != name}, data
        case 1:
            return header | {name: header[other], other: header[name]}, data
        case _:
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
            more = {f"extra{n}": empty for n in range(rng.choice((1, 5000)))}
            return header | more, data


def _change_data(rng: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    at = rng.randrange(len(data) + 1)
    nan = struct.pack("<f", float("nan"))
    return header, rng.choice(
        (data[:at], data + data[:at], b"\xff" * len(data), data[:at] + nan + data[at + 4 :])
    )


_CHANGES: tuple[Callable[[random.Random, Header, bytes], tuple[Header, bytes]], ...] = (
    *(_change_header, _change_header, _change_entry, _change_entry, _rename, _change_data),
)
