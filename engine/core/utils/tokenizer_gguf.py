"""Tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece's ("llama", "gemma4").

A SentencePiece BPE file has a score for each piece and no merges. Every way to cut a piece into two
other pieces becomes a merge, ranked by the piece's score, which makes BPE join the same neighbours
in the same order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.core.errors import ModelFormatError
from engine.core.utils.tokenizer_parts import TokenizerParts, end_ids, looks_special, sentinel
from engine.core.utils.tokenizer_pre import byte_level_words, word_split

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_TYPES: dict[type, set[type]] = {str: {str}, int: {int, bool}, float: {float, int, bool}}


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    kind = metadata.get(_PREFIX + "model")
    pieces = _array(metadata, "tokens", str)
    if not pieces:
        raise ModelFormatError(
            "tokenizer.ggml.tokens is missing or empty: the file has no vocabulary."
        )
    types = _array(metadata, "token_type", int, len(pieces)) or [_NORMAL] * len(pieces)
    bos_id = _id(metadata, "bos_token_id", pieces)
    ends = [_id(metadata, f"{name}_token_id", pieces) for name in ("eos", "eot", "eom")]
    specials = _special_ids(pieces, types, [bos_id, *ends])
    vocab = _vocab(pieces, specials)
    if kind == "gpt2":
        split = word_split(str(metadata.get(_PREFIX + "pre", "default")))
        engine = _engine(vocab, _merges(metadata), ignore_merges=split.ignore_merges)
        engine.pre_tokenizer = byte_level_words(split)
        space_prefix, wants_bos = False, split.add_bos
    elif kind == "llama":
        scores = _array(metadata, "scores", float, len(pieces))
        if not scores:
            raise ModelFormatError(
                "tokenizer.ggml.scores is missing; a SentencePiece vocabulary needs it."
            )
        engine = _sentencepiece(vocab, _merges_from_scores(pieces, scores, types, specials), types)
        space_prefix, wants_bos = _flag(metadata, "add_space_prefix", True), True
        spaces = [normalizers.Prepend("▁")] if space_prefix else []
        engine.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    elif kind == "gemma4":
        engine = _sentencepiece(vocab, _merges(metadata), types)
        space_prefix, wants_bos = False, True
        engine.normalizer = normalizers.Replace(" ", "▁")
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    else:
        raise ModelFormatError(
            f"tokenizer.ggml.model is {kind!r}; this engine reads 'gpt2', 'llama' and 'gemma4'."
        )
    literal = frozenset(i for i, type_ in enumerate(types) if type_ == _USER_DEFINED) - specials
    engine.add_tokens(
        [AddedToken(pieces[i], normalized=False) for i in sorted(literal) if pieces[i]]
    )
    engine.add_special_tokens([AddedToken(sentinel(i), normalized=False) for i in sorted(specials)])
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        engine=engine,
        pieces=tuple(pieces),
        special_ids=specials,
        literal_ids=literal,
        byte_level=kind == "gpt2",
        space_prefix=space_prefix,
        bos_id=bos_id,
        eos_id=ends[0],
        eos_ids=end_ids(pieces, specials, [i for i in ends if i is not None]),
        add_bos=_flag(metadata, "add_bos_token", wants_bos) and bos_id is not None,
        add_eos=_flag(metadata, "add_eos_token", False) and ends[0] is not None,
        chat_template=template if isinstance(template, str) else None,
    )


def _array(
    metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None
) -> list[Any]:
    """An array of the vocabulary as a list; empty where the file has none."""
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
    return bool(metadata.get(_PREFIX + name, default))


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
    marked = {i for i, type_ in enumerate(types) if type_ in (_CONTROL, _UNKNOWN)}
    marked.update(i for i, piece in enumerate(pieces) if piece[:1] == "<" and looks_special(piece))
    marked.update(i for i in named if i is not None)
    return frozenset(marked)


def _vocab(pieces: Sequence[str], specials: frozenset[int]) -> dict[str, int]:
    vocab = dict(zip(pieces, range(len(pieces)), strict=True))
    if len(vocab) != len(pieces):
        twice = next(piece for i, piece in enumerate(pieces) if vocab[piece] != i)
        raise ModelFormatError(f"tokenizer.ggml.tokens holds the piece {twice!r} twice.")
    for i in specials:
        del vocab[pieces[i]]
        vocab[sentinel(i)] = i
    return vocab


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
        if type_ in (_NORMAL, _USER_DEFINED) and i not in specials
    }
    ranked = [
        (-score, -cut, piece)
        for piece, score in joinable.items()
        for cut in range(1, len(piece))
        if piece[:cut] in joinable and piece[cut:] in joinable
    ]
    ranked.sort()
    return [(piece[:-minus_cut], piece[-minus_cut:]) for _, minus_cut, piece in ranked]


def _engine(
    vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:
        raise ModelFormatError(
            f"tokenizer.ggml.merges do not fit the vocabulary: {error}."
        ) from error


def _sentencepiece(
    vocab: dict[str, int], merges: list[tuple[str, str]], types: Sequence[int]
) -> tokenizers.Tokenizer:
    unknown = next((i for i, type_ in enumerate(types) if type_ == _UNKNOWN), None)
    return _engine(
        vocab,
        merges,
        unk_token=None if unknown is None else sentinel(unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
