"""Loads tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece ("llama",
"gemma4").

A "llama" file has a score per piece and no merges. So for every piece, each way to split it into
two other pieces becomes a merge, ranked by the piece's score. BPE with these merges joins the same
neighbours in the same order as SentencePiece.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer_parts import end_ids, looks_special
from engine.core.text.tokenizer_pre import word_split
from engine.core.text.tokenizer_tables import TokenizerTables

_PREFIX = "tokenizer.ggml."
# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_TYPES: dict[type, set[type]] = {str: {str}, int: {int, bool}, float: {float, int, bool}}


def tables_from_gguf(metadata: Mapping[str, Any]) -> TokenizerTables:
    if not isinstance(metadata.get(_PREFIX + "model"), str):
        raise ModelFormatError("tokenizer.ggml.model is missing, or no text.")
    kind = metadata[_PREFIX + "model"]
    pieces = _array(metadata, "tokens", str)
    if not pieces:
        raise ModelFormatError(
            "tokenizer.ggml.tokens is missing or empty: the file has no vocabulary."
        )
    types = _array(metadata, "token_type", int, len(pieces)) or [NORMAL] * len(pieces)
    bos_id = _id(metadata, "bos_token_id", pieces)
    ends = [_id(metadata, f"{name}_token_id", pieces) for name in ("eos", "eot", "eom")]
    specials = _special_ids(pieces, types, [bos_id, *ends])
    split, space_prefix, wants_bos = "", False, True
    if kind == "gpt2":
        split = str(metadata.get(_PREFIX + "pre", "default"))
        wants_bos = word_split(split).add_bos
        merges = _merges(metadata)
    elif kind == "llama":
        scores = _array(metadata, "scores", float, len(pieces))
        if not scores:
            raise ModelFormatError(
                "tokenizer.ggml.scores is missing; a SentencePiece vocabulary needs it."
            )
        merges = _merges_from_scores(pieces, scores, types, specials)
        space_prefix = _flag(metadata, "add_space_prefix", True)
    elif kind == "gemma4":
        merges = _merges(metadata)
    else:
        raise ModelFormatError(
            f"tokenizer.ggml.model is {kind!r}; this engine reads 'gpt2', 'llama' and 'gemma4'."
        )
    template = metadata.get("tokenizer.chat_template")
    for_tools = metadata.get("tokenizer.chat_template.tool_use")
    return TokenizerTables(
        kind=kind,
        pieces=tuple(pieces),
        merges=merges,
        split=split,
        unknown_id=next((i for i, type_ in enumerate(types) if type_ == UNKNOWN), None),
        special_ids=specials,
        literal_ids=frozenset(i for i, type_ in enumerate(types) if type_ == USER_DEFINED)
        - specials,
        space_prefix=space_prefix,
        bos_id=bos_id,
        eos_id=ends[0],
        eos_ids=end_ids(pieces, specials, [i for i in ends if i is not None]),
        add_bos=_flag(metadata, "add_bos_token", wants_bos) and bos_id is not None,
        add_eos=_flag(metadata, "add_eos_token", False) and ends[0] is not None,
        chat_template=template if isinstance(template, str) else None,
        tool_template=for_tools if isinstance(for_tools, str) else None,
    )


def unused_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Token ids of type UNUSED: no text is ever encoded to them."""
    types = _array(metadata, "token_type", int)
    return frozenset(i for i, type_ in enumerate(types) if type_ == UNUSED)


def _array(
    metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None
) -> list[Any]:
    """A vocabulary array as a list; empty if the file has none."""
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


def _merges_from_scores(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    specials: frozenset[int],
) -> list[tuple[str, str]]:
    joinable = {
        piece: score
        for i, (piece, score, type_) in enumerate(zip(pieces, scores, types, strict=True))
        if type_ in (NORMAL, USER_DEFINED) and i not in specials
    }
    ranked = [
        (-score, -cut, piece)
        for piece, score in joinable.items()
        for cut in range(1, len(piece))
        if piece[:cut] in joinable and piece[cut:] in joinable
    ]
    ranked.sort()
    return [(piece[:-minus_cut], piece[-minus_cut:]) for _, minus_cut, piece in ranked]
