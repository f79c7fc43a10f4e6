"""llama2.c's tokenizer.bin: the max token length, then a score and the bytes of each token.

Tokens have spaces where SentencePiece has "▁". Older files store the 256 byte tokens as raw bytes,
newer ones spell them "<0x0A>". Both are read; the newer form is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from engine.backends.custom.conversion.llama2c import BOS_ID, EOS_ID
from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer_gguf import BYTE, CONTROL, NORMAL, UNKNOWN
from engine.core.text.tokenizer_to_gguf import PREFIX

_LENGTH = Struct("<i")
_PIECE = Struct("<fi")
_MAX_PIECE_BYTES = 4096
_FIRST_BYTE = 3  # byte tokens have ids 3 .. 258
_NAMES = {0: "<unk>", BOS_ID: "<s>", EOS_ID: "</s>"}


def read_tokenizer(path: Path, vocab_size: int) -> dict[str, Any]:
    """Read the tokenizer as `tokenizer.*` keys of GGUF metadata."""
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
    """The content of a tokenizer.bin."""
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
