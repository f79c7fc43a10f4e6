"""What every tokenizer loader produces, and the rules that loaders share.

Control tokens never enter the `tokenizers` vocabulary under their own text. Each is stored there as
a sentinel that holds a random number drawn at import, so no text that a client can send, and no
merge in a model file, can produce a control id: that takes a sentinel, and only
`Tokenizer.encode_rendered` writes those.
"""

import functools
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tokenizers

_NONCE = "".join(chr(0xF0000 + secrets.randbelow(0xFFFD)) for _ in range(8))

# Control tokens that end an assistant's turn, whichever id the metadata calls "eos".
_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The result of loading. `pieces[id]` is the vocabulary entry, special tokens included."""

    engine: tokenizers.Tokenizer
    pieces: Sequence[str]
    special_ids: frozenset[int]
    literal_ids: frozenset[int]  # added tokens: the piece is the text itself, not an encoding of it
    byte_level: bool  # pieces spell bytes with the GPT-2 alphabet; otherwise "▁" and "<0xNN>"
    space_prefix: bool  # encoding puts a space before the text, so decoding drops one
    bos_id: int | None
    eos_id: int | None  # what templates call eos_token; `eos_ids` are all that end generation
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    chat_template: str | None


@functools.cache
def sentinel(token_id: int) -> str:
    """The only text that the `tokenizers` engine turns into control token `token_id`."""
    return f"{_NONCE}{chr(0x100000 + (token_id >> 12))}{chr(0x101000 + (token_id & 0xFFF))}"


def looks_special(piece: str) -> bool:
    """Whether a piece is written like a control token, however the file classifies it."""
    return len(piece) > 4 and (
        (piece.startswith("<|") and piece.endswith("|>"))
        or (piece.startswith("<｜") and piece.endswith("｜>"))
        or piece in _END_OF_TURN
    )


def end_ids(
    pieces: Sequence[str], specials: Collection[int], named: Sequence[int]
) -> tuple[int, ...]:
    """The ids that end generation: those the model names first, then the well-known ones."""
    texts = {pieces[i]: i for i in sorted(specials)}
    known = [i for text, i in texts.items() if text in _END_OF_TURN]
    if "<|return|>" in texts and "<|end|>" in texts:
        # Such models close each message of a turn with <|end|>, and the turn with <|return|>.
        known.remove(texts["<|end|>"])
    return tuple(dict.fromkeys([*named, *known]))


def _gpt2_alphabet() -> dict[int, int]:
    """Code point of the GPT-2 alphabet -> byte. Printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    return {b: b for b in printable} | {256 + n: byte for n, byte in enumerate(shifted)}


_ALPHABET: Mapping[int, int] = _gpt2_alphabet()


def is_byte_piece(piece: str) -> bool:
    """Whether a SentencePiece vocabulary means a single byte by it, as "<0x0A>" does."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """The bytes that an ordinary vocabulary piece stands for."""
    if byte_level:
        try:
            return bytes([_ALPHABET[ord(char)] for char in piece])
        except KeyError:  # an entry outside the alphabet is plain text
            return piece.encode("utf-8", "replace")
    if is_byte_piece(piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode("utf-8", "replace")
