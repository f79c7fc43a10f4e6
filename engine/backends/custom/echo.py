"""A prompt given back before its continuation, with the scores of its tokens if they are wanted.

Only the first choice is scored; what comes back for the others before that is kept until then.
"""

from collections.abc import Iterator

from engine.core.interfaces.request import GenerateRequest, TokenDelta, TokenLogprobs


class Echo:
    def __init__(self, text: str, request: GenerateRequest) -> None:
        self.text = text
        self.scores: tuple[TokenLogprobs, ...] | None = None
        self._needs_scores = request.params.score_prompt
        self._held: list[TokenDelta] = []
        self._echoed: set[int] = set()

    def ready(self, delta: TokenDelta) -> Iterator[TokenDelta]:
        """The deltas that can be shown, now that this one has arrived."""
        if delta.prompt_logprobs is not None:
            self.scores = delta.prompt_logprobs
        if self._needs_scores and self.scores is None:
            self._held.append(delta)
            return
        held, self._held = self._held, []
        yield delta
        yield from held

    def is_due(self, delta: TokenDelta) -> bool:
        """True once for each choice: the prompt comes before this delta."""
        if delta.choice in self._echoed:
            return False
        self._echoed.add(delta.choice)
        return True
