"""Converts token ids to text as they arrive, one `Detokenizer` per choice.

The text that `push` returns is final: it has only complete code points, and no text that could be
the start of a stop string.
"""

import codecs
from collections.abc import Iterable

from engine.core.errors import InvalidRequestError
from engine.core.text.tokenizer import Tokenizer


class StopStrings:
    """Cuts a text that arrives in parts at the first stop string. The results of all `push` calls
    and of `flush`, joined, are the text before the stop string.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        if not all(stop):
            raise InvalidRequestError("A stop string must not be empty.", param="stop")
        self.stopped: str | None = None
        self._stop = stop
        self._held = ""
        self._held_ends = frozenset(char for text in stop for char in text[:-1])

    def push(self, text: str) -> str:
        if self.stopped is not None or not text:
            return ""
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """End the text. Call this after the last `push`. Returns the text still held back."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """The length of the longest suffix of `text` that is a prefix of a stop string."""
        if text[-1] not in self._held_ends:
            return 0
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Detokenizes one choice. The results of all `push` calls and of `flush`, joined, equal the
    result of `Tokenizer.decode` for all ids, cut at the first stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
        continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._stops = StopStrings(stop) if stop else None
        self._table = tokenizer.bytes_table(skip_special, shown)
        self._utf8 = _Utf8Decoder("replace")
        self._drop_space = tokenizer.drops_leading_space and not continuation

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return None if self._stops is None else self._stops.stopped

    def push(self, token_ids: Iterable[int], may_stop: bool = True) -> str:
        """Add tokens, and return the text that became final. If `may_stop` is false, the text of
        these tokens is not searched for stop strings.
        """
        if self.stopped is not None:
            return ""
        table = self._table
        return self._advance(self._utf8.decode(b"".join([table[i] for i in token_ids])), may_stop)

    def flush(self) -> str:
        """End the text. Call this at the end of generation. Returns the text still held back."""
        if self.stopped is not None:
            return ""
        text = self._advance(self._utf8.decode(b"", final=True), may_stop=True)
        return text if self._stops is None else text + self._stops.flush()

    def _advance(self, text: str, may_stop: bool) -> str:
        if self._drop_space and text:
            self._drop_space = False
            text = text.removeprefix(" ")
        if self._stops is None or not may_stop:
            return text
        return self._stops.push(text)
