"""Converts a GGUF tokenizer to the files of a Hugging Face directory."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, processors

from engine.core.text.tokenizer_gguf import tables_from_gguf, unused_ids
from engine.core.text.tokenizer_tables import TokenizerTables, build_engine, vocab_of


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokenizer files for the metadata of a GGUF file, as file name -> content."""
    tables = tables_from_gguf(metadata)
    engine = _engine(tables, unused_ids(metadata))
    pieces = tables.pieces
    unknown = None if tables.unknown_id is None else pieces[tables.unknown_id]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if tables.bos_id is None else pieces[tables.bos_id],
        "eos_token": None if tables.eos_id is None else pieces[tables.eos_id],
        "unk_token": unknown,
        "add_bos_token": tables.add_bos,
        "add_eos_token": tables.add_eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": _chat_templates(tables),
    }
    stated = {key: value for key, value in settings.items() if value is not None}
    return {
        "tokenizer.json": engine.to_str(),
        "tokenizer_config.json": json.dumps(stated, indent=2, ensure_ascii=False),
    }


def _chat_templates(tables: TokenizerTables) -> Any:
    """The template, or a list of named templates if there is one for requests with tools."""
    if tables.tool_template is None or tables.chat_template is None:
        return tables.chat_template
    named = {"default": tables.chat_template, "tool_use": tables.tool_template}
    return [{"name": name, "template": template} for name, template in named.items()]


def _engine(tables: TokenizerTables, unused: frozenset[int]) -> tokenizers.Tokenizer:
    pieces = tables.pieces
    vocab = {piece: i for piece, i in vocab_of(pieces).items() if i not in unused}
    unknown = None if tables.unknown_id is None else pieces[tables.unknown_id]
    engine = build_engine(tables, vocab, unknown)
    if tables.kind == "gpt2":
        engine.decoder = decoders.ByteLevel()
    elif tables.kind == "bert":
        engine.decoder = decoders.WordPiece(cleanup=False)
    else:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if tables.space_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        engine.decoder = decoders.Sequence(steps)
    engine.add_tokens(
        [AddedToken(pieces[i], normalized=False) for i in sorted(tables.literal_ids) if pieces[i]]
    )
    engine.add_special_tokens(
        [AddedToken(pieces[i], normalized=False) for i in sorted(tables.special_ids) if pieces[i]]
    )
    _put_ends(engine, tables)
    return engine


def _put_ends(engine: tokenizers.Tokenizer, tables: TokenizerTables) -> None:
    """Make the tokenizer add BOS and EOS to each text, if the model expects them."""
    first = tables.bos_id if tables.add_bos else None
    last = tables.eos_id if tables.add_eos else None
    named = [(tables.pieces[i], i) for i in (first, last) if i is not None]
    if not named:
        return
    single = ["$A:0"]
    if first is not None:
        single.insert(0, f"{tables.pieces[first]}:0")
    if last is not None:
        single.append(f"{tables.pieces[last]}:0")
    pair = [*single, *(item.replace(":0", ":1").replace("$A", "$B") for item in single)]
    engine.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=named
    )
