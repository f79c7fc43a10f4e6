"""Loads tokenizers from a Hugging Face directory: `tokenizer.json` and the small files beside it,
or instead of it a file that `tokenizer_ranks` reads.

All files are read as JSON or text. Keys that name Python code (`auto_map`, `tokenizer_class`) are
ignored, and other formats are not read. So a model directory can't make the engine run code.
"""

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers

from engine.core.errors import ModelFormatError
from engine.core.text.charsmap import check_charsmap
from engine.core.text.json_text import read_json, read_text
from engine.core.text.tokenizer_parts import PairFormat, TokenizerParts, end_ids, sentinel

_CONTINUES = "##"  # prefix of WordPiece pieces that continue a word
_MAX_WORD = 1000
_MAX_GAP = 1 << 16  # max unused ids in a vocabulary; real vocabularies reserve some thousands
_MAX_IDS = 1 << 21  # limit for token ids, ten times a large vocabulary; tables have one row per id
# Texts that are encoded once when a tokenizer is loaded. If the library fails on one of them, the
# file is refused.
_PROBES = ("", "a", " a  b\n", "it's 1234", "é ü", "你好", "🙂", "\x00\ufffd", "<a|b>")


def parts_from_directory(path: Path) -> TokenizerParts:
    spec, defaults = _read_spec(path)
    settings = defaults | (read_json(path / "tokenizer_config.json") or {})
    _check_normalizer(spec.get("normalizer"), path)
    byte_level, space_prefix = _text_form(spec, path)
    added = _added_tokens(spec, path)
    word_pieces = _is_word_piece(spec)
    specials = frozenset(token["id"] for token in added if token["special"])
    pieces = _pieces(spec, added, path)
    engine = _hide_specials(spec, added, specials, path)
    bos_id = _find(settings, "bos_token", pieces, specials)
    eos_id = _find(settings, "eos_token", pieces, specials)
    first, last = _ends_of_prompt(engine, len(pieces), path)
    pair = _pair_format(engine, len(pieces))
    engine.post_processor = None
    bos_id = first if bos_id is None else bos_id
    eos_id = last if eos_id is None else eos_id
    ends = _generation_ends(path, len(pieces)) or ([] if eos_id is None else [eos_id])
    named = frozenset(token["id"] for token in added)
    return TokenizerParts(
        engine=engine,
        pieces=_spell_words(pieces, named) if word_pieces else pieces,
        special_ids=specials,
        literal_ids=named - specials,
        byte_level=byte_level,
        space_prefix=space_prefix,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=end_ids(pieces, specials, ends),
        add_bos=_flag(settings, "add_bos_token", first is not None) and bos_id is not None,
        add_eos=_flag(settings, "add_eos_token", last is not None) and eos_id is not None,
        chat_template=_chat_template(path, settings),
        tool_template=_tool_template(path, settings),
        prompt_end_id=last,
        pair=pair,
    )


def _read_spec(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of tokenizer.json, or of a file that can be converted to it, and defaults for
    tokenizer_config.json.
    """
    spec = read_json(path / "tokenizer.json")
    if spec is not None:
        return spec, {}
    from engine.core.text.tokenizer_ranks import spec_from_ranks  # few models need it

    found = spec_from_ranks(path)
    if found is None:
        raise ModelFormatError(
            f"{path} has no tokenizer.json, tekken.json or tiktoken file; export a tokenizer.json "
            "with the model's own tokenizer, or use a GGUF file."
        )
    return found


def _check_normalizer(normalizer: Any, path: Path) -> None:
    """Check the character maps of a normalizer, because the library panics on a damaged map."""
    if isinstance(normalizer, dict) and isinstance(normalizer.get("normalizers"), list):
        for step in normalizer["normalizers"]:
            _check_normalizer(step, path)
    if not isinstance(normalizer, dict) or normalizer.get("type") != "Precompiled":
        return
    where = f"{path / 'tokenizer.json'}: precompiled_charsmap"
    try:
        charsmap = base64.b64decode(normalizer.get("precompiled_charsmap") or "", validate=True)
    except (TypeError, ValueError) as error:
        raise ModelFormatError(f"{where} is not valid base64.") from error
    check_charsmap(charsmap, where)


def _flag(settings: dict[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name)
    return value if isinstance(value, bool) else default


def _text_form(spec: dict[str, Any], path: Path) -> tuple[bool, bool]:
    """Returns whether pieces are byte-level, and whether decoding drops a leading space. Decoders
    that would change the text in other ways are refused.
    """
    decoder = spec.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    named = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    # Our detokenizer always joins pieces and decodes bytes, as these two do.
    named = [step for step in named if step.get("type") not in ("ByteFallback", "Fuse")]
    kinds = [str(step.get("type")) for step in named]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["WordPiece"] and _is_word_piece(spec):
        return False, True
    if kinds == ["Metaspace"] and named[0].get("replacement", "▁") == "▁":
        return False, named[0].get("prepend_scheme", "always") != "never"
    if kinds[:1] == ["Replace"] and _is_step(named[0], pattern={"String": "▁"}, content=" "):
        if kinds[1:] == ["Strip"] and _is_step(named[1], content=" ", start=1, stop=0):
            return False, True
        if not kinds[1:]:
            return False, False
    raise ModelFormatError(
        f"{path / 'tokenizer.json'} decodes with {kinds or 'nothing'}; this engine reads the usual "
        "decoders of byte-level, SentencePiece-style and WordPiece tokenizers. Use a GGUF file of "
        "this model."
    )


def _is_step(step: dict[str, Any], **expected: Any) -> bool:
    return all(step.get(key) == value for key, value in expected.items())


def _is_word_piece(spec: dict[str, Any]) -> bool:
    model = spec.get("model")
    return isinstance(model, dict) and model.get("type") == "WordPiece"


def _spell_words(pieces: tuple[str, ...], named: frozenset[int]) -> tuple[str, ...]:
    """Convert WordPiece pieces to SentencePiece's form. WordPiece marks pieces that continue a word
    ("##"); our detokenizer expects a mark on pieces that begin a word ("▁").
    """
    return tuple(
        piece
        if i in named or not piece
        else piece.removeprefix(_CONTINUES)
        if piece.startswith(_CONTINUES)
        else f"▁{piece}"
        for i, piece in enumerate(pieces)
    )


def _added_tokens(spec: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    added = spec.get("added_tokens") or []
    seen: set[int] = set()
    for token in added if isinstance(added, list) else [None]:
        if (
            not isinstance(token, dict)
            or not isinstance(token.get("id"), int)
            or not isinstance(token.get("content"), str)
            or not isinstance(token.get("special"), bool)
            or not 0 <= token["id"] < _MAX_IDS
            or token["id"] in seen
        ):
            raise ModelFormatError(
                f"{path / 'tokenizer.json'}: added_tokens entry {token!r} is malformed."
            )
        seen.add(token["id"])
    return sorted(added, key=lambda token: int(token["id"]))


def _check_word_piece(model: dict[str, Any], path: Path) -> None:
    """Raise `ModelFormatError` if a WordPiece model allows very long words, or uses another prefix
    than "##". WordPiece takes quadratic time in the length of a word.
    """
    longest = model.get("max_input_chars_per_word", 100)
    if model.get("continuing_subword_prefix", _CONTINUES) != _CONTINUES or not (
        isinstance(longest, int) and 1 <= longest <= _MAX_WORD
    ):
        raise ModelFormatError(
            f"{path / 'tokenizer.json'}: WordPiece is read with the prefix {_CONTINUES!r} and "
            f"words of at most {_MAX_WORD} characters only."
        )


def _model_vocab(spec: dict[str, Any], path: Path) -> dict[str, int]:
    model = spec.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if _is_word_piece(spec):
        _check_word_piece(spec["model"], path)
    elif isinstance(model, dict) and any(
        model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")
    ):
        # With such an affix, the library slices pieces by the affix's length in bytes, which may
        # cut a character in two.
        raise ModelFormatError(f"{path / 'tokenizer.json'}: affixes in model are not supported.")
    if isinstance(vocab, list):  # Unigram: the list position is the id
        if not all(map(_is_scored_piece, vocab)):
            raise ModelFormatError(
                f"{path / 'tokenizer.json'}: a Unigram vocabulary lists pieces with their scores."
            )
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        if len(vocab) != len(model["vocab"]):  # type: ignore[index]
            raise ModelFormatError(
                f"{path / 'tokenizer.json'}: the vocabulary holds a piece twice."
            )
    if not isinstance(vocab, dict) or not all(
        isinstance(piece, str) and isinstance(i, int) and 0 <= i < _MAX_IDS
        for piece, i in vocab.items()
    ):
        raise ModelFormatError(f"{path / 'tokenizer.json'}: model.vocab is missing or malformed.")
    if len(set(vocab.values())) != len(vocab):
        raise ModelFormatError(f"{path / 'tokenizer.json'}: two pieces share one id.")
    return vocab


def _is_scored_piece(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], (int, float))
    )


def _pieces(spec: dict[str, Any], added: list[dict[str, Any]], path: Path) -> tuple[str, ...]:
    vocab = _model_vocab(spec, path)
    by_id = {i: piece for piece, i in vocab.items()}
    for token in added:
        if by_id.setdefault(token["id"], token["content"]) != token["content"]:
            raise ModelFormatError(
                f"{path / 'tokenizer.json'}: id {token['id']} is both {by_id[token['id']]!r} "
                f"and the added token {token['content']!r}."
            )
    highest = max(by_id, default=-1)
    if highest > 2 * len(by_id) + _MAX_GAP:
        raise ModelFormatError(
            f"{path / 'tokenizer.json'}: {len(by_id)} tokens have ids up to {highest}."
        )
    return tuple(by_id.get(i, "") for i in range(highest + 1))


def _hide_specials(
    spec: dict[str, Any], added: list[dict[str, Any]], specials: frozenset[int], path: Path
) -> tokenizers.Tokenizer:
    """Build the `tokenizers` object, with the text of each special token replaced by a sentinel
    (see `tokenizer_parts`). So client text that looks like a special token stays text.
    """
    model = spec["model"]
    hidden = {token["content"]: sentinel(token["id"]) for token in added if token["special"]}
    vocab: dict[str, int] | list[list[Any]]
    if isinstance(model["vocab"], dict):
        # Added tokens are put into the vocabulary with their ids. Otherwise the library would
        # number them itself.
        vocab = {piece: i for piece, i in model["vocab"].items() if piece not in hidden}
        vocab.update(
            (hidden.get(token["content"], token["content"]), token["id"]) for token in added
        )
    else:
        vocab = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model = {**model, "unk_token": hidden.get(model["unk_token"], model["unk_token"])}
    renamed = [
        {**token, "content": hidden.get(token["content"], token["content"])} for token in added
    ]
    if _is_word_piece(spec):
        # BERT's normalizer would drop a sentinel, because it looks like control characters.
        renamed = [{**token, "normalized": False} for token in renamed]
    spec = {**spec, "model": {**model, "vocab": vocab}, "added_tokens": renamed}
    spec["padding"] = spec["truncation"] = None
    engine = _build(json.dumps(spec), path)
    for token in renamed:
        if engine.token_to_id(token["content"]) != token["id"]:
            raise ModelFormatError(
                f"{path / 'tokenizer.json'}: added token {token['id']} does not follow the "
                "vocabulary."
            )
    return engine


def _build(spec: str, path: Path) -> tokenizers.Tokenizer:
    try:
        engine = tokenizers.Tokenizer.from_str(spec)
        for text in _PROBES:
            engine.encode(text)
    except BaseException as error:
        # A Rust panic in the library is not an `Exception`.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelFormatError(f"{path / 'tokenizer.json'} cannot be used: {error}.") from error
    return engine


def _ends_of_prompt(
    engine: tokenizers.Tokenizer, vocab_size: int, path: Path
) -> tuple[int | None, int | None]:
    """The ids that the post-processor adds before and after a text; None if it adds none there."""
    bare = engine.encode("a", add_special_tokens=False).ids
    full = engine.encode("a", add_special_tokens=True).ids
    if max(full, default=0) >= vocab_size:
        # The post-processor has its own ids, which the library never checks against the vocabulary.
        raise ModelFormatError(
            f"{path / 'tokenizer.json'}: post_processor adds id {max(full)}, outside the "
            f"vocabulary of {vocab_size} pieces."
        )
    if len(full) == len(bare):
        return None, None
    starts = full[0] if full[: len(bare)] != bare else None
    ends = full[-1] if full[-len(bare) :] != bare else None
    return starts, ends


def _pair_format(engine: tokenizers.Tokenizer, vocab_size: int) -> PairFormat | None:
    """What the post-processor puts around two texts; None if it does not join them in order."""
    first, second = (engine.encode(text, add_special_tokens=False).ids for text in ("a", "b"))
    joined = engine.encode("a", "b", add_special_tokens=True)
    ids, types = joined.ids, joined.type_ids
    places = [
        (start, begin)
        for start in range(len(ids))
        if ids[start : start + len(first)] == first
        for begin in range(start + len(first), len(ids))
        if ids[begin : begin + len(second)] == second
    ]
    if len(places) != 1 or not first or not second or max(ids) >= vocab_size:
        return None
    start, begin = places[0]
    has_types = types == [0] * begin + [1] * (len(ids) - begin)
    between, after = ids[start + len(first) : begin], ids[begin + len(second) :]
    if not between or not (has_types or set(types) == {0}):
        return None
    return PairFormat(tuple(ids[:start]), tuple(between), tuple(after), has_types)


def _find(
    settings: dict[str, Any], name: str, pieces: tuple[str, ...], specials: frozenset[int]
) -> int | None:
    value = settings.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return next((i for i in sorted(specials) if pieces[i] == text), None)


def _generation_ends(path: Path, vocab_size: int) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = (read_json(path / name) or {}).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if ids:
            if not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
                raise ModelFormatError(
                    f"{path / name}: eos_token_id {value!r} is outside the vocabulary of "
                    f"{vocab_size} pieces."
                )
            return ids
    return []


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    separate = path / "chat_template.jinja"
    if separate.is_file():
        return read_text(separate)
    value = _named_templates(settings).get("default", settings.get("chat_template"))
    return value if isinstance(value, str) else None


def _tool_template(path: Path, settings: dict[str, Any]) -> str | None:
    separate = path / "additional_chat_templates" / "tool_use.jinja"
    if separate.is_file():
        return read_text(separate)
    value = _named_templates(settings).get("tool_use")
    return value if isinstance(value, str) else None


def _named_templates(settings: dict[str, Any]) -> dict[Any, Any]:
    """Templates by name, if the settings have a list of them."""
    value = settings.get("chat_template")
    items = value if isinstance(value, list) else []
    return {item.get("name"): item.get("template") for item in items if isinstance(item, dict)}
