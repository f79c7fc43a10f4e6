"""Stop strings and stop patterns: cut a text at the first of them, as the text arrives."""

from typing import TYPE_CHECKING

from engine.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher


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


class StopPattern:
    """A compiled regular expression. llguidance matches it in linear time, whatever it is."""

    def __init__(self, pattern: str) -> None:
        # imported late, because few requests have a stop pattern
        from llguidance import LLMatcher, LLTokenizer

        from engine.core.grammar.limits import parser_limits
        from engine.core.grammar.spec import stop_grammar

        self.pattern = pattern
        self._matcher = LLMatcher(
            LLTokenizer("byte"), stop_grammar(pattern), log_level=0, limits=parser_limits()
        )
        if self._matcher.is_error():
            fault = self._matcher.get_error()
            raise InvalidRequestError(f"stop_regex: {fault}", param="stop_regex")
        if self._matcher.is_accepting():
            raise InvalidRequestError(
                "stop_regex: a pattern that matches the empty text would end every answer at once.",
                param="stop_regex",
            )

    def matcher(self) -> "LLMatcher":
        """A new matcher. It accepts a text that ends with a match."""
        return self._matcher.deep_copy()


class StopPatterns:
    """Cuts a text that arrives in parts after the first match of a pattern. The match is part of
    the text, and ends as early as possible.
    """

    def __init__(self, patterns: tuple[StopPattern, ...]) -> None:
        self.stopped: str | None = None
        self._matchers = [(each.pattern, each.matcher()) for each in patterns]

    def push(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        for index, char in enumerate(text):
            for pattern, matcher in self._matchers:
                matcher.try_consume_tokens(list(char.encode("utf-8", "replace")))
                if matcher.is_error():
                    raise InvalidRequestError(
                        "stop_regex became too complex to follow; simplify it.", param="stop_regex"
                    )
                if matcher.is_accepting():
                    self.stopped = pattern
                    return text[: index + 1]
        return text
