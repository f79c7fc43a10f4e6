"""A GGUF tokenizer as plain, validated data, and functions that build a tokenizer from this data.

The data can be cached on disk. A `tokenizers` object can't, because each process has different
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
    """The data of a GGUF tokenizer. For fields without a comment, see `TokenizerParts`."""

    kind: Literal["gpt2", "llama", "gemma4", "bert", "t5", "whitespace"]
    pieces: tuple[str, ...]
    unknown_id: int | None
    special_ids: frozenset[int]
    literal_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    tool_template: str | None = None
    merges: list[tuple[str, str]] = []  # the kinds "bert" and "t5" have none
    split: str = ""  # name of the pre-tokenizer, for the kind "gpt2"
    space_prefix: bool = False
    # Only for the kind "t5", which is SentencePiece's Unigram:
    scores: list[float] = []  # log probability of each piece
    charsmap: bytes = b""  # SentencePiece's character map; empty if there is none
    collapse_spaces: bool = False  # also removes spaces at both ends of a text
    # Only for the kinds "bert" and "whitespace":
    lowercase: bool = False
    strip_accents: bool = False


def parts_from_tables(tables: TokenizerTables) -> TokenizerParts:
    pieces, specials = tables.pieces, tables.special_ids
    unknown = None if tables.unknown_id is None else sentinel(tables.unknown_id)
    engine = build_engine(tables, _hidden_vocab(pieces, specials), unknown)
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


def build_engine(
    tables: TokenizerTables, vocab: dict[str, int], unknown: str | None
) -> tokenizers.Tokenizer:
    """Build the tokenizer of the tables. `vocab` and `unknown` are used instead of `tables.pieces`,
    so that sentinels can replace control tokens.
    """
    if tables.kind == "bert":
        return _word_piece(tables, vocab, unknown)
    if tables.kind == "t5":
        return _unigram(tables, vocab)
    if tables.kind == "gpt2":
        split = word_split(tables.split)
        engine = _bpe(tables, vocab, ignore_merges=split.ignore_merges)
        engine.pre_tokenizer = byte_level_words(split)
        return engine
    if tables.kind == "whitespace":
        engine = _bpe(tables, vocab, unk_token=unknown)
        engine.normalizer = normalizers.Lowercase() if tables.lowercase else None
        engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return engine
    engine = _bpe(tables, vocab, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    if tables.kind == "llama":
        engine.normalizer = normalizers.Sequence(_mark_spaces(tables))
    else:
        engine.normalizer = normalizers.Replace(" ", "▁")
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    return engine


def _mark_spaces(tables: TokenizerTables) -> list[normalizers.Normalizer]:
    steps = [normalizers.Prepend("▁")] if tables.space_prefix else []
    return [*steps, normalizers.Replace(" ", "▁")]


def _word_piece(
    tables: TokenizerTables, vocab: dict[str, int], unknown: str | None
) -> tokenizers.Tokenizer:
    """A WordPiece tokenizer. In GGUF, "▁" marks the pieces that begin a word; in the library, "##"
    marks those that do not.
    """
    named = tables.special_ids | tables.literal_ids
    marked = {
        piece if i in named else piece[1:] if piece.startswith("▁") else f"##{piece}": i
        for piece, i in vocab.items()
    }
    if len(marked) != len(vocab):
        raise ModelFormatError("tokenizer.ggml.tokens holds a WordPiece piece twice.")
    engine = tokenizers.Tokenizer(
        models.WordPiece(vocab=marked, unk_token=unknown, max_input_chars_per_word=100)
    )
    engine.normalizer = normalizers.BertNormalizer(
        lowercase=tables.lowercase, strip_accents=tables.strip_accents
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return engine


def _unigram(tables: TokenizerTables, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    pieces = sorted(vocab, key=vocab.__getitem__)
    engine = tokenizers.Tokenizer(
        models.Unigram(
            vocab=list(zip(pieces, tables.scores, strict=True)),
            unk_id=tables.unknown_id,
            byte_fallback="<0x00>" in vocab,
        )
    )
    steps: list[normalizers.Normalizer] = []
    if tables.charsmap:
        steps.append(normalizers.Precompiled(tables.charsmap))
    if tables.collapse_spaces:
        steps += [
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(r"\A | \z"), ""),
        ]
    engine.normalizer = normalizers.Sequence([*steps, *_mark_spaces(tables)])
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
    """Piece -> id, with control tokens replaced by their sentinels."""
    vocab = vocab_of(pieces)
    for i in specials:
        del vocab[pieces[i]]
        vocab[sentinel(i)] = i
    return vocab
