"""`TokenizerParts`, the result of all tokenizer loaders, and functions that the loaders share.

Control tokens never enter the vocabulary of the `tokenizers` library under their own text. Each is
stored as a sentinel: a text with a random part, which is chosen when this module is imported. Only
a sentinel is encoded to a control token's id, and only `Tokenizer.encode_rendered` writes
sentinels. So neither client text nor a merge in a model file can produce such an id.
"""

import functools
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tokenizers

_NONCE = "".join(chr(0xF0000 + secrets.randbelow(0xFFFD)) for _ in range(8))

# Control tokens that end an assistant's turn. They end generation even if the metadata names
# another token as EOS.
_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|im_end|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|assistant_end|>",
        "<turn|>",
        "<|tool_response>",
        "<seed:eos>",
        "[e~[",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A loaded tokenizer. `pieces[id]` is the vocabulary entry of a token, also of control
    tokens.
    """

    engine: tokenizers.Tokenizer
    pieces: Sequence[str]
    special_ids: frozenset[int]
    # Added tokens that are not control tokens. With byte-level pieces, they are plain text.
    # Otherwise they are written like other pieces, because runs of spaces are such tokens.
    literal_ids: frozenset[int]
    # True: pieces are written in GPT-2's byte alphabet. False: pieces are written as in
    # SentencePiece, with "▁" for a space and "<0xNN>" for a byte.
    byte_level: bool
    space_prefix: bool  # whether encoding adds a leading space, which detokenizing drops
    bos_id: int | None
    eos_id: int | None  # id of `eos_token` in chat templates
    eos_ids: tuple[int, ...]  # all ids that end generation
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    tool_template: str | None = None  # the chat template for requests with tools, if it differs
    # The id after a prompt, if `add_eos` and it is not `eos_id`.
    prompt_end_id: int | None = None
    pair: "PairFormat | None" = None  # None: the tokenizer does not say how to join two texts


@dataclass(frozen=True, slots=True)
class PairFormat:
    """The token ids around the two texts of a pair, such as [CLS] a [SEP] b [SEP]."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    has_types: bool  # the tokens from the second text on have token type 1


@functools.cache
def sentinel(token_id: int) -> str:
    """The only text that the `tokenizers` library maps to control token `token_id`."""
    return f"{_NONCE}{chr(0x100000 + (token_id >> 12))}{chr(0x101000 + (token_id & 0xFFF))}"


def looks_special(piece: str) -> bool:
    """Whether a piece looks like a control token, even if the file does not say that it is one."""
    return len(piece) > 4 and (
        (piece.startswith("<|") and piece.endswith("|>"))
        or (piece.startswith("<｜") and piece.endswith("｜>"))
        or piece in _END_OF_TURN
    )


def end_ids(
    pieces: Sequence[str], specials: Collection[int], named: Sequence[int]
) -> tuple[int, ...]:
    """The ids that end generation: first those that the model names, then other well-known ones."""
    texts = {pieces[i]: i for i in sorted(specials)}
    known = [i for text, i in texts.items() if text in _END_OF_TURN]
    ends = dict.fromkeys([*named, *known])
    if texts.keys() & {"<|return|>", "<|flush|>"}:
        # These models end each message of a turn with <|end|>, and the whole turn with another
        # token. Some files still name <|end|>.
        ends.pop(texts.get("<|end|>", -1), None)
    return tuple(ends)


def _gpt2_alphabet() -> dict[int, int]:
    """Code point in GPT-2's byte alphabet -> the byte that it stands for. Printable Latin-1
    characters stand for themselves.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    return {b: b for b in printable} | {256 + n: byte for n, byte in enumerate(shifted)}


_ALPHABET: Mapping[int, int] = _gpt2_alphabet()
_LETTERS = {byte: chr(char) for char, byte in _ALPHABET.items()}
# For `str.translate`: each letter becomes the character with the number of its byte. Characters
# below 256 that are no letters become one that Latin-1 does not have.
BYTES_OF_LETTERS = {**dict.fromkeys(range(256), 0xFFFF), **_ALPHABET}


def byte_level_text(token: bytes) -> str:
    """The bytes of a token, written in GPT-2's byte alphabet."""
    return "".join([_LETTERS[byte] for byte in token])


def is_byte_piece(piece: str) -> bool:
    """Whether a SentencePiece piece stands for one byte, such as "<0x0A>"."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
