"""Collects the events of one choice into an answer: its text, its tokens and its finish reason."""

from bisect import bisect_right
from dataclasses import dataclass, field

from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
)


@dataclass
class ComparedAnswer:
    """An answer in which reasoning, text and tool calls are joined to one text, in order of
    arrival.

    Text beyond `max_chars` is dropped, and `is_cut` is set.
    """

    max_chars: int | None = None
    tokens: list[TokenText] = field(default_factory=list)  # filled if logprobs were requested
    num_tokens: int = 0
    finish_reason: str | None = None
    is_cut: bool = False
    _pieces: list[str] = field(default_factory=list)
    _num_chars: int = 0
    # For each piece of text: how many characters, and how many tokens, had arrived after it.
    _char_ends: list[int] = field(default_factory=list)
    _token_ends: list[int] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, TextEvent):
            self._add_text(event)
        elif isinstance(event, ReasoningEvent):
            self._say(event.text)
        elif isinstance(event, ToolCallEvent):
            self._say(f"\n{event.name} {event.arguments}" if event.name else event.arguments)
        elif isinstance(event, FinishEvent):
            self.finish_reason = event.reason

    @property
    def said(self) -> str:
        return "".join(self._pieces)

    @property
    def end_token(self) -> TokenText | None:
        """The control token that ended the answer, if the backend returns it among the tokens."""
        if self.finish_reason != "stop" or not self.tokens:
            return None
        last = self.tokens[-1]
        is_hidden = not self.said.encode().endswith(last.token_bytes)
        return last if is_hidden or not last.token_bytes else None

    @property
    def shown_tokens(self) -> list[TokenText]:
        return self.tokens if self.end_token is None else self.tokens[:-1]

    def tokens_until(self, num_chars: int) -> int:
        """How many tokens were complete after the first `num_chars` characters."""
        index = bisect_right(self._char_ends, num_chars)
        return self._token_ends[index - 1] if index else 0

    def _add_text(self, event: TextEvent) -> None:
        self.num_tokens += event.num_tokens
        if self.is_cut:
            return
        self._say(event.text)
        self.tokens += event.logprobs or ()
        self._char_ends.append(self._num_chars)
        self._token_ends.append(self.num_tokens)

    def _say(self, text: str) -> None:
        if not text or self.is_cut:
            return
        if self.max_chars is not None and self._num_chars + len(text) > self.max_chars:
            text = text[: self.max_chars - self._num_chars]
            self.is_cut = True
        self._pieces.append(text)
        self._num_chars += len(text)
