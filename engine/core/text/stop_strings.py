"""Stop strings: cuts a text at the first of them, as the text arrives."""

from engine.core.errors import InvalidRequestError


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
