"""The echo of a prompt: when each choice gets it, and which of its tokens are part of its text.

A request with `echo` gets its prompt as the first text of each choice. `generation.py` turns it
into events, with the logprobs of the prompt's tokens if the request asks for them.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from engine.core.interfaces.backend import TokenText
from engine.core.interfaces.request import GenerateRequest, TokenDelta, TokenLogprobs


class Echo:
    """Returns the prompt before its continuation (`echo`), with prompt logprobs if requested. Only
    the first choice gets these logprobs from the engine. Until they arrive, deltas of other choices
    are held back.
    """

    def __init__(self, text: str, request: GenerateRequest) -> None:
        self.text = text
        self.scores: tuple[TokenLogprobs, ...] | None = None
        self._needs_scores = request.params.score_prompt
        self._held: list[TokenDelta] = []
        self._echoed: set[int] = set()

    def ready(self, delta: TokenDelta) -> Iterator[TokenDelta]:
        """Yields the deltas that can be processed now that `delta` has arrived. These are `delta`
        and all deltas held back before, or none while `delta` itself must be held back.
        """
        if delta.prompt_logprobs is not None:
            self.scores = delta.prompt_logprobs
        if self._needs_scores and self.scores is None:
            self._held.append(delta)
            return
        held, self._held = self._held, []
        yield delta
        yield from held

    def is_due(self, delta: TokenDelta) -> bool:
        """Whether the prompt must be returned before this delta. This is True for the first delta
        of each choice.
        """
        if delta.choice in self._echoed:
            return False
        self._echoed.add(delta.choice)
        return True


def echoed_tokens(text: str, tokens: Sequence[TokenText]) -> Iterator[TokenText]:
    """The tokens of an echoed prompt, with `in_text` as in its text. Control tokens are part of the
    text if their names are there, which is not so for a BOS that was added. The first token loses a
    leading space that the text does not have.
    """
    whole, end = text.encode(), 0
    for token in tokens:
        if end == 0 and token.token.startswith(" ") and not text.startswith(" "):
            token = replace(token, token=token.token[1:], token_bytes=token.token_bytes[1:])
        is_there = token.in_text or whole.startswith(token.token_bytes, end)
        end += len(token.token_bytes) if is_there else 0
        yield replace(token, in_text=is_there)
