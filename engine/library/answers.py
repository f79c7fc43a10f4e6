"""Collects the events of a request into `RequestOutput` objects."""

import math
from collections.abc import Iterator, Sequence

from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    TextEvent,
    TokenText,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams as WireParams
from engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.servers.openai.format import Choice
from engine.servers.serving.event_pump import OutputEvent


class _Choice(Choice):
    """What has arrived of one choice since the start. `clear` leaves out text and tokens that the
    user already has; tool calls and the sum of the log-probabilities are kept.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self._sum_logprobs = 0.0

    def clear(self) -> None:
        for had in (self.texts, self.reasoning, self.token_ids, self.tokens):
            had.clear()

    def add(self, event: OutputEvent) -> None:
        super().add(event)
        if isinstance(event, TextEvent):
            self._sum_logprobs += sum(token.logprob for token in event.logprobs or ())

    def output(self, num_logprobs: int | None, named: bool = False) -> CompletionOutput:
        """The choice so far. If `named`, it has the logprobs of `logprob_token_ids`."""
        logprobs = None
        if num_logprobs is not None and named:
            logprobs = [_by_name(token) for token in self.tokens]
        elif num_logprobs is not None:
            logprobs = [_by_id(token, num_logprobs) for token in self.tokens]
        finish = self.finish
        return CompletionOutput(
            index=self.index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else self._sum_logprobs,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            reasoning="".join(self.reasoning),
            tool_calls=tuple(call.body() for _, call in sorted(self.calls.items())),
        )


class GrowingOutput:
    """The answer to one prompt while it is generated. `params` are the parameters that the user
    gave.
    """

    def __init__(self, request_id: str, prompt: str | None, params: WireParams) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._num_logprobs = params.logprobs
        self._named_logprobs = bool(params.logprob_token_ids)
        ours = params if isinstance(params, SamplingParams) else None
        self._num_prompt_logprobs = ours.prompt_logprobs if ours else None
        self._shows_stop = ours is not None and ours.include_stop_str_in_output
        self._kind = ours.output_kind if ours else RequestOutputKind.CUMULATIVE
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._choices = [_Choice(index) for index in range(params.n)]
        self._usage: UsageEvent | None = None

    def started(self, prompt_token_ids: tuple[int, ...] | None) -> None:
        self._prompt_token_ids = prompt_token_ids

    def stream(self, event: Event) -> Iterator[RequestOutput]:
        """Add an event. Yields an output if the event has something new for the user."""
        self.add(event)
        if isinstance(event, UsageEvent):
            yield self.output()
        elif self._kind is not RequestOutputKind.FINAL_ONLY and not _is_empty(event):
            if self._kind is RequestOutputKind.CUMULATIVE:
                yield self.output()
            elif not isinstance(event, FinishEvent):  # the last output has the ends of all choices
                choice = self._choices[event.choice]
                yield self.output([choice])
                choice.clear()

    def add(self, event: Event) -> None:
        if isinstance(event, UsageEvent):
            self._usage = event
            return
        is_prompt = isinstance(event, TextEvent) and not event.num_tokens and event.logprobs
        if isinstance(event, TextEvent) and is_prompt:
            self._add_prompt(event.logprobs or ())
            return
        choice = self._choices[event.choice]
        choice.add(event)
        stop = event.stop_reason if isinstance(event, FinishEvent) else None
        if isinstance(stop, str) and self._shows_stop:
            choice.texts.append(stop)

    def output(self, choices: Sequence[_Choice] | None = None) -> RequestOutput:
        """The answer so far, with all choices or with the given ones."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[
                choice.output(self._num_logprobs, self._named_logprobs)
                for choice in choices or self._choices
            ],
            finished=self._usage is not None,
            usage=self._usage,
        )

    def _add_prompt(self, tokens: Sequence[TokenText]) -> None:
        most = self._num_prompt_logprobs or 0
        self._prompt_logprobs = [
            None if math.isnan(token.logprob) else _by_id(token, most) for token in tokens
        ]


def _is_empty(event: Event) -> bool:
    return isinstance(event, TextEvent) and not event.text and not event.num_tokens


def _by_id(token: TokenText, most: int) -> TokenLogprobs:
    """The sampled token and at most `most` alternatives, by token id."""
    ranks = {each.token_id: rank for rank, each in enumerate(token.top, 1)}
    found = {token.token_id: Logprob(token.logprob, ranks.get(token.token_id), token.token)}
    for rank, each in enumerate(token.top[:most], 1):
        found.setdefault(each.token_id, Logprob(each.logprob, rank, each.token))
    return found


def _by_name(token: TokenText) -> TokenLogprobs:
    """The tokens of `logprob_token_ids` and the sampled one, by token id. Ranks are not known."""
    return {each.token_id: Logprob(each.logprob, None, each.token) for each in token.top}
