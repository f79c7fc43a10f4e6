"""Converts a Hugging Face tokenizer to GGUF metadata.

The pieces and merges of byte-level BPE are copied. GGUF also needs the name of the pre-tokenizer.
It is found by trying which known pre-tokenizer splits a test text in the same way. For
SentencePiece BPE, merges are converted to scores.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from engine.core.text.tokenizer_json import parts_from_directory
from engine.core.text.tokenizer_parts import TokenizerParts, is_byte_piece
from engine.core.text.tokenizer_pre import KNOWN_SPLITS, byte_level_words

PREFIX = "tokenizer.ggml."
# A text that pre-tokenizers with different patterns split differently.
_TELLING = (
    "Hello  World's we'LL they're 'S 12345678 x=3.14;foo_bar(camelCase HTTPServer)\n\n \t end...\r"
    "\n  ünïcödé Ⅷ ½ 你好世界。ひらがな カタカナ 한국어 ¿Qué?! <|x|> $5^2~`a` #tag @me "
    "1234abc àb\u0301c  "
    "/path/to\n/x 'tis\t\tI'm 🙂🙂 --> ==\n  DON'T d'Or 1st 22nd"
)


def gguf_tokenizer(directory: Path, vocab_size: int) -> dict[str, Any]:
    """The GGUF keys `tokenizer.*`, for a model whose embedding table has `vocab_size` rows."""
    parts = parts_from_directory(directory)
    spec: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = spec["model"]
    if model.get("type") != "BPE":
        raise ModelFormatError(
            f"{directory / 'tokenizer.json'} is a {model.get('type')} tokenizer; only BPE can be "
            "written into a GGUF file"
        )
    if len(parts.pieces) > vocab_size:
        raise ModelFormatError(
            f"{directory / 'tokenizer.json'} has {len(parts.pieces)} pieces, the model's table "
            f"only {vocab_size} rows; remove the added tokens that the model does not know"
        )
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    keys: dict[str, Any] = {
        "model": "gpt2" if parts.byte_level else "llama",
        **(
            {"pre": split_name(spec)}
            if parts.byte_level
            else {"scores": _scores(parts.pieces, merges, vocab_size)}
        ),
        "tokens": _padded(parts.pieces, vocab_size),
        "token_type": _types(parts, model.get("unk_token"), vocab_size),
        "bos_token_id": parts.bos_id,
        "eos_token_id": parts.eos_id,
        "eot_token_id": next((i for i in parts.eos_ids if i != parts.eos_id), None),
        "add_bos_token": parts.add_bos,
        "add_eos_token": parts.add_eos,
        "add_space_prefix": parts.space_prefix,
    }
    if parts.byte_level:
        keys["merges"] = [" ".join(merge) for merge in merges]
    stated = {PREFIX + key: value for key, value in keys.items() if value is not None}
    if parts.chat_template is not None:
        stated["tokenizer.chat_template"] = parts.chat_template
    if parts.tool_template is not None:
        stated["tokenizer.chat_template.tool_use"] = parts.tool_template
    return stated


def split_name(spec: dict[str, Any]) -> str:
    """The name that GGUF has for the pre-tokenizer of a byte-level tokenizer."""
    stage = {**spec, "normalizer": None, "post_processor": None, "added_tokens": []}
    ours = tokenizers.Tokenizer.from_str(json.dumps(stage)).pre_tokenizer
    ignores = bool(spec["model"].get("ignore_merges"))
    found = None if ours is None else ours.pre_tokenize_str(_TELLING)
    for name, split in KNOWN_SPLITS.items():
        cut = byte_level_words(split).pre_tokenize_str(_TELLING)
        if cut == found and split.ignore_merges == ignores:
            return name
    raise ModelFormatError(
        "tokenizer.json cuts text into words in a way that GGUF has no name for here; "
        "keep the model as safetensors"
    )


def _padded(pieces: Sequence[str], vocab_size: int) -> list[str]:
    """The pieces, padded to `vocab_size` entries. Padding and unused ids get names that no text is
    encoded to.
    """
    names = [piece or f"[PAD{i}]" for i, piece in enumerate(pieces)]
    return names + [f"[PAD{i}]" for i in range(len(pieces), vocab_size)]


def _types(parts: TokenizerParts, unknown: str | None, vocab_size: int) -> np.ndarray:
    types = np.full(vocab_size, UNUSED, np.int32)
    for i, piece in enumerate(parts.pieces):
        if not parts.byte_level and piece == unknown:
            types[i] = UNKNOWN
        elif i in parts.special_ids:
            types[i] = CONTROL
        elif i in parts.literal_ids:
            types[i] = USER_DEFINED
        elif not parts.byte_level and is_byte_piece(piece):
            types[i] = BYTE
        elif piece:
            types[i] = NORMAL
    return types


def _scores(
    pieces: Sequence[str], merges: Sequence[tuple[str, ...]], vocab_size: int
) -> np.ndarray:
    """The scores of the pieces. The result of an earlier merge has a higher score. Pieces that no
    merge produces have the lowest scores.
    """
    rank: dict[str, int] = {}
    for order, merge in enumerate(merges):
        rank.setdefault("".join(merge), order)
    made = sorted(rank, key=lambda piece: rank[piece])
    score = {piece: -float(order) for order, piece in enumerate(made)}
    last = -float(len(made))
    scores = [score.get(piece, last - i) for i, piece in enumerate(pieces)]
    return np.array(scores + [last - vocab_size] * (vocab_size - len(pieces)), np.float32)
