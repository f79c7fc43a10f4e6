"""Converts text to token ids and back, for one model.

Client text does not become a control token: control tokens have no textual form in the underlying
vocabulary (see `tokenizer_parts`). Only a `RenderedPrompt`, in which the template's own control
tokens are already ids, can contain them, and text whose client asked for it (`parse_special`). A
`Tokenizer` is immutable, so threads may share it.
"""

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.text.stop_strings import StopPattern, StopPatterns, StopStrings
from engine.core.text.tokenizer_json import parts_from_directory
from engine.core.text.tokenizer_parts import (
    BYTES_OF_LETTERS,
    TokenizerParts,
    is_byte_piece,
    sentinel,
)
from engine.core.text.tokenizer_tables import TokenizerTables, parts_from_tables

# The `tokenizers` library reads this variable at each batch. Our batches have one text, so more
# threads would not help.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
MAX_TEXTS = 64  # max number of texts whose token sequences are kept
# A control character. Vocabularies have it as a byte at most, so no token has more text with it.
_UNMERGED = "\x02"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class SpecialTokens:
    """The control tokens of a model: their texts, and their ids. `pattern` matches the longest
    control token at each position.
    """

    ids: Mapping[str, int]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        texts = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    @cached_property
    def edges(self) -> frozenset[str]:
        """The punctuation characters with which control tokens start or end."""
        ends = {char for text in self.ids for char in (text[0], text[-1])}
        return frozenset(char for char in ends if not char.isalnum())


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A chat prompt: a sequence of plain texts and of ids of the template's control tokens."""

    segments: tuple[str | int, ...]


class TokenBytes(dict[int, bytes]):
    """Maps a token id to the bytes of its text. An entry is computed on first use, because most
    tokens of a vocabulary are rarely used.
    """

    def __init__(self, parts: TokenizerParts, skipped: frozenset[int]) -> None:
        super().__init__()
        self._parts = parts
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        parts = self._parts
        if not 0 <= token_id < len(parts.pieces) or token_id in self._skipped:
            value = b""  # padding rows of the embedding table have ids, but no text
        elif token_id in parts.special_ids or (token_id in parts.literal_ids and parts.byte_level):
            value = parts.pieces[token_id].encode("utf-8", "replace")
        else:
            value = piece_bytes(parts.pieces[token_id], parts.byte_level)
        self[token_id] = value
        return value


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """The bytes that a piece stands for, if it is neither a control token nor an added token."""
    if byte_level:
        try:
            return piece.translate(BYTES_OF_LETTERS).encode("latin-1")
        except UnicodeEncodeError:  # a character is not in the alphabet, so the piece is plain text
            return piece.encode("utf-8", "replace")
    if is_byte_piece(piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode("utf-8", "replace")


class Tokenizer:
    """Encodes prompts and detokenizes output. Build one with `from_gguf` or `from_directory`."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._engine = parts.engine
        self._parts = parts
        self._visible = TokenBytes(parts, skipped=parts.special_ids)
        self._literal = TokenBytes(parts, skipped=frozenset())
        self._showing: dict[frozenset[int], TokenBytes] = {}
        self._with_text: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.specials = SpecialTokens(
            {parts.pieces[i]: i for i in sorted(parts.special_ids) if parts.pieces[i]}
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        # imported late, because it imports numpy
        from engine.core.text.tokenizer_gguf import tables_from_gguf

        return cls.from_tables(tables_from_gguf(metadata))

    @classmethod
    def from_tables(cls, tables: TokenizerTables) -> "Tokenizer":
        return cls(parts_from_tables(tables))

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        return cls(parts_from_directory(path))

    def with_template(self, source: str) -> "Tokenizer":
        """The same tokenizer with another chat template. A built-in one has no BOS of its own."""
        if self._parts.add_bos:
            # imported late: few models are given a template
            from engine.core.text.builtin_templates import BUILTIN_TEMPLATES

            if source in BUILTIN_TEMPLATES.values():
                source = "{{ bos_token }}" + source
        return Tokenizer(replace(self._parts, chat_template=source, tool_template=None))

    @property
    def vocab_size(self) -> int:
        return len(self._parts.pieces)

    @property
    def bos_id(self) -> int | None:
        return self._parts.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._parts.eos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._parts.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._parts.special_ids

    @property
    def drops_leading_space(self) -> bool:
        """Whether detokenizing removes the space that encoding adds before the text."""
        return self._parts.space_prefix

    @property
    def chat_template(self) -> str | None:
        """The model's chat template source, for `ChatTemplate`."""
        return self._parts.chat_template

    @property
    def tool_template(self) -> str | None:
        """The source of a separate chat template for requests with tools."""
        return self._parts.tool_template

    @property
    def bos(self) -> str:
        return "" if self.bos_id is None else self._parts.pieces[self.bos_id]

    @property
    def eos(self) -> str:
        eos_id = self._parts.eos_id
        return "" if eos_id is None else self._parts.pieces[eos_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._parts.special_ids

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Encode text without adding BOS or EOS. With `parse_special`, names of control tokens in
        the text become these tokens. Otherwise they are encoded as plain text.
        """
        if parse_special:
            ids = self.specials.ids
            text = self.specials.pattern.sub(lambda found: sentinel(ids[found.group()]), text)
        try:
            # The batch call releases the GIL; the library's call for a single text does not.
            return self._engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # the library raises this for invalid Unicode
            raise InvalidRequestError(
                "The text holds half of a surrogate pair, which is not Unicode; send whole "
                "characters."
            ) from error

    def encode_continuation(self, text: str) -> list[int]:
        """Encode text that follows other text, so that no space is added before it."""
        if not self.drops_leading_space:
            return self.encode(text)
        return self.encode(_UNMERGED + text)[len(self.encode(_UNMERGED)) :]

    def encode_prompt(
        self, text: str, add_bos: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Encode the prompt of a completion. Adds BOS and EOS if the model expects them. A parsed
        prompt that starts with BOS gets no second one.
        """
        ids, parts = self.encode(text, parse_special), self._parts
        bos_id = self.bos_id if add_bos and parts.add_bos else None
        if bos_id is not None and not (parse_special and ids[:1] == [bos_id]):
            ids.insert(0, bos_id)
        end_id = parts.eos_id if parts.prompt_end_id is None else parts.prompt_end_id
        if parts.add_eos and end_id is not None:
            ids.append(end_id)
        return ids

    def encode_pair(
        self, first: str, second: str, max_tokens: int | None = None
    ) -> tuple[list[int], int]:
        """Encode two texts as one prompt, for a cross-encoder. Returns the ids, and the index of
        the first token with token type 1; 0 if there is none. To stay within `max_tokens`, the end
        of the second text is cut.
        """
        pair = self._parts.pair
        if pair is None:
            raise InvalidRequestError("This model's tokenizer does not join two texts.")
        ids = [*pair.before, *self.encode(first), *pair.between]
        start, rest = len(ids), self.encode(second)
        if max_tokens is not None:
            rest = rest[: max(0, max_tokens - start - len(pair.after))]
        return [*ids, *rest, *pair.after], start if pair.has_types else 0

    def encode_rendered(self, rendered: RenderedPrompt) -> list[int]:
        """Encode a chat prompt. BOS is not added here, because the template adds it."""
        return self.encode(
            "".join(s if isinstance(s, str) else sentinel(s) for s in rendered.segments)
        )

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False
    ) -> str:
        """The text of the tokens `ids`. If `continuation` is true, the ids follow other text, so a
        leading space is kept.
        """
        table = self.bytes_table(skip_special)
        text = b"".join([table[i] for i in ids]).decode("utf-8", "replace")
        if self.drops_leading_space and not continuation:
            return text.removeprefix(" ")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the output. A control token adds none."""
        return self._visible[token_id]

    def token_literal(self, token_id: int) -> bytes:
        """Like `token_bytes`, but for a control token its name. Used to show tokens with
        logprobs.
        """
        return self._literal[token_id]

    def bytes_table(
        self, skip_special: bool, shown: frozenset[int] = frozenset()
    ) -> Mapping[int, bytes]:
        """Token id -> bytes of its text. If `skip_special` is true, control tokens have no bytes,
        except for those in `shown`.
        """
        if not skip_special:
            return self._literal
        if not shown:
            return self._visible
        if shown not in self._showing:
            self._showing[shown] = TokenBytes(self._parts, self._parts.special_ids - shown)
        return self._showing[shown]

    def sequences_with(self, text: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences that contain `text` and need all their tokens for it. A sequence is
        one token, or a token that ends with the start of `text`, and the tokens of the rest.
        """
        found = self._with_text.get(text)
        if found is None:
            if len(self._with_text) >= MAX_TEXTS:
                self._with_text.clear()
            found = self._with_text[text] = tuple(self._find_sequences(text))
        return found

    def _find_sequences(self, text: str) -> Iterator[tuple[int, ...]]:
        whole, literal = text.encode("utf-8", "surrogatepass"), self._literal
        splits = range(1, len(text))
        rests = {text[:size].encode(): tuple(self.encode(text[size:])) for size in splits}
        for token_id in range(self.vocab_size):
            piece = literal[token_id]
            if whole in piece:
                yield (token_id,)
            else:
                for start, rest in rests.items():
                    if piece.endswith(start):
                        yield (token_id, *rest)

    def token_id(self, text: str) -> int | None:
        """The id of the control token or added token with exactly this text, or None."""
        return self._marker_ids.get(text)

    @cached_property
    def _marker_ids(self) -> dict[str, int]:
        marked = self._parts.special_ids | self._parts.literal_ids
        return {self._parts.pieces[i]: i for i in sorted(marked)}


class Detokenizer:
    """Converts the token ids of one choice to text as they arrive.

    The text that `push` returns is final: it has only complete code points, and no text that could
    be the start of a stop string. The results of all `push` calls and of `flush`, joined, equal the
    result of `Tokenizer.decode` for all ids, cut before the first stop string or after the first
    match of a regular expression.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
        continuation: bool = False,
        shown: frozenset[int] = frozenset(),
        patterns: tuple[StopPattern, ...] = (),
    ) -> None:
        self._stops = StopStrings(stop) if stop else None
        self._patterns = StopPatterns(patterns) if patterns else None
        self._can_stop = bool(stop or patterns)
        self._table = tokenizer.bytes_table(skip_special, shown)
        self._utf8 = _Utf8Decoder("replace")
        self._drop_space = tokenizer.drops_leading_space and not continuation

    @property
    def stopped(self) -> str | None:
        """The stop string or the regular expression that ended the text, or None."""
        # Regular expressions only see the text before a stop string, so a match comes first.
        if self._patterns is not None and self._patterns.stopped is not None:
            return self._patterns.stopped
        return None if self._stops is None else self._stops.stopped

    def push(self, token_ids: Iterable[int], may_stop: bool = True) -> str:
        """Add tokens, and return the text that became final. If `may_stop` is false, the text of
        these tokens is not searched for stop strings.
        """
        if self._can_stop and self.stopped is not None:
            return ""
        table = self._table
        raw = b"".join([table[i] for i in token_ids])
        # ASCII behind complete code points needs no decoder.
        is_ascii = raw.isascii() and not self._utf8.buffer
        text = raw.decode("ascii") if is_ascii else self._utf8.decode(raw)
        return self._advance(text, may_stop) if self._can_stop or self._drop_space else text

    def flush(self) -> str:
        """End the text. Call this at the end of generation. Returns the text still held back."""
        if self.stopped is not None:
            return ""
        text = self._advance(self._utf8.decode(b"", final=True), may_stop=True)
        return text if self._stops is None else text + self._search(self._stops.flush())

    def _advance(self, text: str, may_stop: bool) -> str:
        if self._drop_space and text:
            self._drop_space = False
            text = text.removeprefix(" ")
        if not may_stop:
            return text
        return self._search(text if self._stops is None else self._stops.push(text))

    def _search(self, text: str) -> str:
        return text if self._patterns is None else self._patterns.push(text)
