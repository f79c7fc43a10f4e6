"""A GGUF tokenizer as plain, validated data, and functions that build a tokenizer from it.

This data can be cached on disk. A `tokenizers` object can't, because each process has different
random sentinels (see `tokenizer_parts`).
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer_parts import TokenizerParts, sentinel
from engine.core.text.tokenizer_pre import byte_level_words, word_split


class TokenizerTables(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF tokenizer. For fields without a comment, see `TokenizerParts`."""

    kind: Literal["gpt2", "llama", "gemma4"]
    pieces: tuple[str, ...]
    merges: list[tuple[str, str]]
    split: str  # name of the pre-tokenizer; only for "gpt2"
    unknown_id: int | None
    special_ids: frozenset[int]
    literal_ids: frozenset[int]
    space_prefix: bool
    bos_id: int | None
    eos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    tool_template: str | None = None


def parts_from_tables(tables: TokenizerTables) -> TokenizerParts:
    pieces, specials = tables.pieces, tables.special_ids
    unknown = None if tables.unknown_id is None else sentinel(tables.unknown_id)
    engine = build_bpe(tables, _hidden_vocab(pieces, specials), unknown)
    engine.add_tokens(
        [AddedToken(pieces[i], normalized=False) for i in sorted(tables.literal_ids) if pieces[i]]
    )
    engine.add_special_tokens([AddedToken(sentinel(i), normalized=False) for i in sorted(specials)])
    return TokenizerParts(
        engine=engine,
        pieces=pieces,
        special_ids=specials,
        literal_ids=tables.literal_ids,
        byte_level=tables.kind == "gpt2",
        space_prefix=tables.space_prefix,
        bos_id=tables.bos_id,
        eos_id=tables.eos_id,
        eos_ids=tables.eos_ids,
        add_bos=tables.add_bos,
        add_eos=tables.add_eos,
        chat_template=tables.chat_template,
        tool_template=tables.tool_template,
    )


def build_bpe(
    tables: TokenizerTables, vocab: dict[str, int], unknown: str | None
) -> tokenizers.Tokenizer:
    """Build a BPE tokenizer from the tables. `vocab` is used instead of `tables.pieces`, so that
    sentinels can replace control tokens.
    """
    if tables.kind == "gpt2":
        split = word_split(tables.split)
        engine = _bpe(tables, vocab, ignore_merges=split.ignore_merges)
        engine.pre_tokenizer = byte_level_words(split)
        return engine
    engine = _bpe(tables, vocab, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    if tables.kind == "llama":
        spaces = [normalizers.Prepend("▁")] if tables.space_prefix else []
        engine.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    else:
        engine.normalizer = normalizers.Replace(" ", "▁")
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    return engine


def _bpe(tables: TokenizerTables, vocab: dict[str, int], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=tables.merges, **options))
    except Exception as error:
        raise ModelFormatError(
            f"tokenizer.ggml.merges do not fit the vocabulary: {error}."
        ) from error


def vocab_of(pieces: Sequence[str]) -> dict[str, int]:
    vocab = dict(zip(pieces, range(len(pieces)), strict=True))
    if len(vocab) != len(pieces):
        twice = next(piece for i, piece in enumerate(pieces) if vocab[piece] != i)
        raise ModelFormatError(f"tokenizer.ggml.tokens holds the piece {twice!r} twice.")
    return vocab


def _hidden_vocab(pieces: Sequence[str], specials: frozenset[int]) -> dict[str, int]:
    """The vocabulary, with control tokens replaced by their sentinels."""
    vocab = vocab_of(pieces)
    for i in specials:
        del vocab[pieces[i]]
        vocab[sentinel(i)] = i
    return vocab
