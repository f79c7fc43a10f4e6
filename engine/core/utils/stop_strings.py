"""Stop strings in text that arrives in pieces.

What `push` returns is final: nothing in it could still turn out to be the start of a stop string.
The match that completes first wins (the longer one where two complete together), which is the same
however the text was cut into pieces.
"""

from engine.core.errors import InvalidRequestError


class StopStrings:
    """Joined `push` results plus `flush` equal the whole text, cut at a stop."""

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
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest tail of `text` that some stop string begins with."""
        if text[-1] not in self._held_ends:
            return 0
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
