"""Loads tokenizers from GGUF metadata: byte-level BPE ("gpt2"), SentencePiece's BPE ("llama",
"gemma4") and Unigram ("t5"), WordPiece ("bert"), and BPE that drops spaces ("whitespace").

A "llama" file has a score per piece and no merges. So for every piece, each way to split it into
two other pieces becomes a merge. Merges are ranked by the score of the piece that they produce. BPE
with these merges joins the same neighbours in the same order as SentencePiece.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.errors import ModelFormatError
from engine.core.text.charsmap import check_charsmap
from engine.core.text.tokenizer_parts import end_ids, looks_special
from engine.core.text.tokenizer_pre import SPACE_MARKED, word_split
from engine.core.text.tokenizer_tables import TokenizerTables

_PREFIX = "tokenizer.ggml."
# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_TYPES: dict[type, set[type]] = {str: {str}, int: {int, bool}, float: {float, int, bool}}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    metadata: Mapping[str, Any]
    pieces: Sequence[str]
    types: Sequence[int]
    specials: frozenset[int]
    unknown_id: int | None


def tables_from_gguf(metadata: Mapping[str, Any]) -> TokenizerTables:
    kind = _kind(metadata)
    pieces = _array(metadata, "tokens", str)
    if not pieces:
        raise ModelFormatError(
            "tokenizer.ggml.tokens is missing or empty: the file has no vocabulary."
        )
    types = _array(metadata, "token_type", int, len(pieces)) or [NORMAL] * len(pieces)
    bos_id, ends = _ends(metadata, kind, pieces)
    unknown_id = next((i for i, type_ in enumerate(types) if type_ == UNKNOWN), None)
    if unknown_id is None and kind in ("bert", "t5"):
        unknown_id = _required_id(metadata, "unknown_token_id", pieces)
    named = [bos_id, *ends, unknown_id]
    specials = _special_ids(pieces, types, named)
    fields = _READERS[kind](_Vocabulary(metadata, pieces, types, specials, unknown_id))
    adds_bos, adds_eos = fields.pop("adds", (True, False))
    template = metadata.get("tokenizer.chat_template")
    for_tools = metadata.get("tokenizer.chat_template.tool_use")
    return TokenizerTables(
        kind=kind,  # type: ignore[arg-type]  # `_kind` returns a key of `_READERS`
        pieces=tuple(pieces),
        unknown_id=unknown_id,
        special_ids=specials,
        literal_ids=frozenset(i for i, type_ in enumerate(types) if type_ == USER_DEFINED)
        - specials,
        bos_id=bos_id,
        eos_id=ends[0],
        eos_ids=end_ids(pieces, specials, [i for i in ends if i is not None]),
        add_bos=_flag(metadata, "add_bos_token", adds_bos) and bos_id is not None,
        add_eos=_flag(metadata, "add_eos_token", adds_eos) and ends[0] is not None,
        chat_template=template if isinstance(template, str) else None,
        tool_template=for_tools if isinstance(for_tools, str) else None,
        **fields,
    )


def _kind(metadata: Mapping[str, Any]) -> str:
    kind = metadata.get(_PREFIX + "model")
    if not isinstance(kind, str):
        raise ModelFormatError("tokenizer.ggml.model is missing, or no text.")
    if kind not in _READERS:
        known = ", ".join(map(repr, _READERS))
        raise ModelFormatError(
            f"tokenizer.ggml.model is {kind!r}; this engine reads {known}. Use the model's "
            "safetensors files with their tokenizer.json instead."
        )
    return "gemma4" if kind == "gpt2" and _split_name(metadata) in SPACE_MARKED else kind


def _split_name(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get(_PREFIX + "pre", "default"))


def _ends(
    metadata: Mapping[str, Any], kind: str, pieces: Sequence[str]
) -> tuple[int | None, list[int | None]]:
    """The id of BOS, and the ids of EOS, EOT and EOM. WordPiece files name [CLS] and [SEP] instead
    of BOS and EOS. The key of [SEP] is misspelled in GGUF.
    """
    ends = [_id(metadata, f"{name}_token_id", pieces) for name in ("eos", "eot", "eom")]
    if kind != "bert":
        return _id(metadata, "bos_token_id", pieces), ends
    ends[0] = _required_id(metadata, "seperator_token_id", pieces)
    begin = "cls_token_id" if _PREFIX + "cls_token_id" in metadata else "bos_token_id"
    return _required_id(metadata, begin, pieces), ends


def _read_byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = _split_name(vocabulary.metadata)
    return {
        "merges": _merges(vocabulary.metadata),
        "split": name,
        "adds": (word_split(name).add_bos, False),
    }


def _read_sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    return {
        "merges": _merges_from_scores(vocabulary, _scores(vocabulary)),
        "space_prefix": _flag(vocabulary.metadata, "add_space_prefix", True),
    }


def _read_space_marked(vocabulary: _Vocabulary) -> dict[str, Any]:
    return {"merges": _merges(vocabulary.metadata)}


def _read_unspaced(vocabulary: _Vocabulary) -> dict[str, Any]:
    return {
        "merges": _merges(vocabulary.metadata),
        "lowercase": _flag(vocabulary.metadata, "normalizer.lowercase", False),
        "adds": (False, False),
    }


def _read_word_piece(vocabulary: _Vocabulary) -> dict[str, Any]:
    lowercase = _flag(vocabulary.metadata, "normalizer.lowercase", True)
    return {
        "space_prefix": True,
        "lowercase": lowercase,
        "strip_accents": _flag(vocabulary.metadata, "normalizer.strip_accents", lowercase),
        "adds": (True, True),
    }


def _read_unigram(vocabulary: _Vocabulary) -> dict[str, Any]:
    metadata = vocabulary.metadata
    if not all(vocabulary.pieces):
        raise ModelFormatError("tokenizer.ggml.tokens holds an empty piece.")
    charsmap = bytes(value & 0xFF for value in _array(metadata, "precompiled_charsmap", int))
    if charsmap:
        check_charsmap(charsmap, "tokenizer.ggml.precompiled_charsmap")
    return {
        "scores": _scores(vocabulary),
        "charsmap": charsmap,
        "space_prefix": _flag(metadata, "add_space_prefix", True),
        "collapse_spaces": _flag(metadata, "remove_extra_whitespaces", False),
        "adds": (False, True),
    }


_READERS: dict[str, Callable[[_Vocabulary], dict[str, Any]]] = {
    "gpt2": _read_byte_level,
    "llama": _read_sentencepiece,
    "gemma4": _read_space_marked,
    "bert": _read_word_piece,
    "t5": _read_unigram,
    "whitespace": _read_unspaced,
}


def unused_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """The token ids of type UNUSED. No text is ever encoded to them."""
    types = _array(metadata, "token_type", int)
    return frozenset(i for i, type_ in enumerate(types) if type_ == UNUSED)


def _array(
    metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None
) -> list[Any]:
    """The array `tokenizer.ggml.NAME` as a list; empty if the file has none. Raises
    `ModelFormatError` if its length or the type of its values is wrong.
    """
    raw = metadata.get(_PREFIX + name)
    if raw is None:
        return []
    if not isinstance(raw, (list, tuple, np.ndarray)):
        raise ModelFormatError(f"tokenizer.ggml.{name} is not an array.")
    values: list[Any] = raw.tolist() if isinstance(raw, np.ndarray) else list(raw)
    if length is not None and len(values) != length:
        raise ModelFormatError(
            f"tokenizer.ggml.{name} has {len(values)} entries for {length} vocabulary pieces."
        )
    if not set(map(type, values)) <= _TYPES[kind]:
        raise ModelFormatError(f"tokenizer.ggml.{name} holds values that are not {kind.__name__}.")
    return values


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, (bool, int)):
        raise ModelFormatError(f"tokenizer.ggml.{name} is neither true nor false.")
    return bool(value)


def _id(metadata: Mapping[str, Any], name: str, pieces: Sequence[str]) -> int | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if not isinstance(value, (int, np.integer)) or not 0 <= value < len(pieces):
        raise ModelFormatError(
            f"tokenizer.ggml.{name} is {value!r}, outside the vocabulary of {len(pieces)} pieces."
        )
    return int(value)


def _required_id(metadata: Mapping[str, Any], name: str, pieces: Sequence[str]) -> int:
    value = _id(metadata, name, pieces)
    if value is None:
        raise ModelFormatError(f"tokenizer.ggml.{name} is missing; this vocabulary needs it.")
    return value


def _special_ids(
    pieces: Sequence[str], types: Sequence[int], named: Sequence[int | None]
) -> frozenset[int]:
    marked = {i for i, type_ in enumerate(types) if type_ in (CONTROL, UNKNOWN)}
    marked.update(i for i, piece in enumerate(pieces) if piece[:1] == "<" and looks_special(piece))
    marked.update(i for i in named if i is not None)
    return frozenset(marked)


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for text in _array(metadata, "merges", str):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise ModelFormatError(
                f"tokenizer.ggml.merges: {text!r} is not two pieces and a space."
            )
        merges.append((left, right))
    if not merges:
        raise ModelFormatError(
            "tokenizer.ggml.merges is missing or empty; this vocabulary needs it."
        )
    return merges


def _scores(vocabulary: _Vocabulary) -> list[float]:
    scores = _array(vocabulary.metadata, "scores", float, len(vocabulary.pieces))
    if not scores:
        raise ModelFormatError(
            "tokenizer.ggml.scores is missing; a SentencePiece vocabulary needs it."
        )
    if not all(map(math.isfinite, scores)):
        raise ModelFormatError("tokenizer.ggml.scores holds values that are not finite.")
    return [float(score) for score in scores]


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    entries = zip(vocabulary.pieces, scores, vocabulary.types, strict=True)
    joinable = {
        piece: score
        for i, (piece, score, type_) in enumerate(entries)
        if type_ in (NORMAL, USER_DEFINED) and i not in vocabulary.specials
    }
    ranked = [
        (-score, -cut, piece)
        for piece, score in joinable.items()
        for cut in range(1, len(piece))
        if piece[:cut] in joinable and piece[cut:] in joinable
    ]
    ranked.sort()
    return [(piece[:-minus_cut], piece[-minus_cut:]) for _, minus_cut, piece in ranked]
