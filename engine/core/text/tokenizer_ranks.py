"""Reads vocabularies of ranked byte strings: Mistral's `tekken.json` and tiktoken files.

They become the content of a `tokenizer.json`, so the same code loads all of them. In such a file,
two neighbours are merged if their bytes together are a token, and the token with the lowest rank is
made first. So each way to split a token into two other tokens becomes a merge.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.core.errors import ModelFormatError
from engine.core.text.json_text import read_json, read_text
from engine.core.text.tokenizer_parts import byte_level_text
from engine.core.text.tokenizer_pre import word_split

_MAX_TOKENS = 1 << 20
_MAX_TOKEN_BYTES = 1024  # real tokens have up to 256 bytes
# The control tokens of tekken files up to version 7, which do not list them.
_TEKKEN_CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


@dataclass(frozen=True, slots=True)
class _AddedToken:
    text: str
    is_control: bool = True


@dataclass(frozen=True, slots=True)
class _Family:
    """What a tiktoken file leaves to the code of its model family."""

    split: str  # name of the pre-tokenizer in GGUF
    # Control tokens, if tokenizer_config.json names none. They follow the last rank.
    control: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


_QWEN = _Family(
    "qwen2",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    {"eos_token": "<|endoftext|>"},
)
_LLAMA = _Family(
    "llama-bpe",
    (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
        *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
        *("<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
    ),
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "add_bos_token": True},
)
# By file name. `tokenizer.model` is used by several families, so its key is the model type.
_FAMILIES = {
    "tiktoken.model": _Family("kimi-k2"),
    "qwen.tiktoken": _QWEN,
    "hy.tiktoken": _Family("hunyuan"),
    "cl100k_base.tiktoken": _Family("dbrx"),
    "o200k_base.tiktoken": _Family("gpt-4o"),
    "llama": _LLAMA,
    "chatglm": _Family("chatglm-bpe"),
    "glm": _Family("chatglm-bpe"),
}


def spec_from_ranks(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The content of `tokenizer.json`, and default settings of `tokenizer_config.json`, for a model
    directory with one of these files. None if it has none.
    """
    if (path / "tekken.json").is_file():
        return _from_tekken(path / "tekken.json")
    files = [*sorted(path.glob("*.tiktoken")), path / "tiktoken.model", path / "tokenizer.model"]
    found = next((file for file in files if file.is_file()), None)
    return None if found is None else _from_tiktoken(found)


def _from_tekken(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    content = read_json(file) or {}
    config, vocab = content.get("config"), content.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocab, list):
        raise ModelFormatError(f"{file} has no config and vocab, so it is not a tekken file.")
    size, num_control = (
        _size(config, name, file) for name in ("default_vocab_size", "default_num_special_tokens")
    )
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise ModelFormatError(f"{file}: config.pattern is missing or no text.")
    control = _tekken_control(content.get("special_tokens"), num_control, file)
    if not 0 < size - num_control <= len(vocab):
        raise ModelFormatError(f"{file}: {len(vocab)} tokens are too few for {size} ids.")
    ranks: dict[bytes, int] = {}
    for rank, token in enumerate(vocab[: size - num_control]):
        if not isinstance(token, dict) or token.get("rank") != rank:
            raise ModelFormatError(f"{file}: vocab entry {rank} does not have this rank.")
        _add_token(ranks, token.get("token_bytes"), rank, file)
    return _spec(ranks, num_control, pattern, control, file), {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
    }


def _size(config: dict[str, Any], name: str, file: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 0 < value <= _MAX_TOKENS:
        raise ModelFormatError(f"{file}: config.{name} is missing or malformed.")
    return value


def _tekken_control(listed: Any, count: int, file: Path) -> dict[int, _AddedToken]:
    """Id -> added token. Ids without a name get the names that Mistral's own code gives them."""
    tokens = {i: _AddedToken(f"<SPECIAL_{i}>") for i in range(count)}
    if listed is None:
        return tokens | {i: _AddedToken(text) for i, text in enumerate(_TEKKEN_CONTROL[:count])}
    for token in listed if isinstance(listed, list) else [listed]:
        entry = token if isinstance(token, dict) else {}
        rank, text, is_control = (entry.get(key) for key in ("rank", "token_str", "is_control"))
        if (
            not (isinstance(rank, int) and 0 <= rank < count)
            or not (isinstance(text, str) and text)
            or not isinstance(is_control, bool)
        ):
            raise ModelFormatError(f"{file}: special_tokens entry {token!r} is malformed.")
        tokens[rank] = _AddedToken(text, is_control)
    return tokens


def _from_tiktoken(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model_type = (read_json(file.parent / "config.json") or {}).get("model_type")
    key = str(model_type) if file.name == "tokenizer.model" else file.name
    family = _FAMILIES.get(key)
    if family is None:
        raise ModelFormatError(
            f"{file}: this engine does not know how {key!r} splits text into words. Export a "
            "tokenizer.json with the model's own tokenizer."
        )
    ranks = _read_ranks(file)
    control = _named_control(file.parent) or {
        i: _AddedToken(text)
        for i, text in enumerate(family.control, max(ranks.values(), default=0) + 1)
    }
    if not control:
        raise ModelFormatError(
            f"{file} has no control tokens, and no tokenizer_config.json with added_tokens_decoder "
            "is beside it. Add that file."
        )
    pattern = word_split(family.split).patterns[0]
    return _spec(ranks, 0, pattern, control, file), dict(family.settings)


def _read_ranks(file: Path) -> dict[bytes, int]:
    if file.open("rb").read(1) == b"\n":
        raise ModelFormatError(
            f"{file} is a SentencePiece model. Export a tokenizer.json with the model's own "
            "tokenizer, or use a GGUF file."
        )
    ranks: dict[bytes, int] = {}
    for line in read_text(file).splitlines():
        text, _, rank = line.partition(" ")
        if not line.strip():
            continue
        if not rank.isascii() or not rank.isdigit() or int(rank[:10]) >= _MAX_TOKENS:
            raise ModelFormatError(f"{file}: {line[:80]!r} is not a token and its rank.")
        _add_token(ranks, text, int(rank), file)
    if len(set(ranks.values())) != len(ranks):
        raise ModelFormatError(f"{file}: two tokens have the same rank.")
    return ranks


def _named_control(directory: Path) -> dict[int, _AddedToken]:
    """The added tokens that tokenizer_config.json lists by id."""
    named = (read_json(directory / "tokenizer_config.json") or {}).get("added_tokens_decoder")
    found = {}
    for key, token in named.items() if isinstance(named, dict) else ():
        text = token.get("content") if isinstance(token, dict) else None
        if not key.isascii() or not key.isdigit() or not isinstance(text, str) or not text:
            raise ModelFormatError(
                f"{directory / 'tokenizer_config.json'}: added_tokens_decoder entry {key!r} is "
                "malformed."
            )
        found[int(key[:10])] = _AddedToken(text, token.get("special") is not False)
    return found


def _add_token(ranks: dict[bytes, int], text: Any, rank: int, file: Path) -> None:
    try:
        token = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        token = b""
    if not 0 < len(token) <= _MAX_TOKEN_BYTES or token in ranks:
        raise ModelFormatError(f"{file}: the token of rank {rank} is malformed or there twice.")
    ranks[token] = rank


def _spec(
    ranks: dict[bytes, int], first_id: int, pattern: str, added: dict[int, _AddedToken], file: Path
) -> dict[str, Any]:
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelFormatError(f"{file} has no token for some of the 256 bytes.")
    texts = {token: byte_level_text(token) for token in ranks}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    as_bytes["use_regex"] = False
    steps = [words | {"invert": False}, as_bytes]
    return {
        "version": "1.0",
        "added_tokens": [
            flags | {"id": i, "content": token.text, "special": token.is_control}
            for i, token in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": as_bytes,
        "model": {
            "type": "BPE",
            # a word that is a token is not split, even if no merges lead to it
            "ignore_merges": True,
            "vocab": {texts[token]: first_id + rank for token, rank in ranks.items()},
            "merges": _merges(ranks, texts),
        },
    }


def _merges(ranks: dict[bytes, int], texts: dict[bytes, str]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        known = [
            (ranks[token[:at]], ranks[token[at:]], at)
            for at in range(1, len(token))
            if token[:at] in ranks and token[at:] in ranks
        ]
        known.sort()
        merges += [(texts[token[:at]], texts[token[at:]]) for _, _, at in known]
    return merges
