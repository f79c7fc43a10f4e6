"""Beam search, over any backend that reports token ids and log-probabilities.

Each step asks the backend for one token after each beam. The beams of a step are computed in one
batch, and a backend with a prefix cache computes only the last tokens of each beam again. As in
vLLM, a step keeps the beams with the highest log-probability. The length penalty counts only when
the finished beams are ranked, and the length includes the prompt.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.backends.base import InferenceBackend, check_context, close_events
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    FinishEvent,
    GenerationContext,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The parameters of a search. `num_returned` beams of the best are returned."""

    width: int
    max_tokens: int
    num_returned: int
    length_penalty: float = 1.0
    ignore_eos: bool = False
    # End the search when `width` beams have ended. Otherwise it goes on to `max_tokens`, because
    # a longer beam may be better.
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt. The score counts the end token, which is not in `tokens`."""

    score: float = 0.0  # sum of the log-probabilities
    tokens: tuple[TokenText, ...] = ()
    finish_reason: Literal["stop", "length"] = "length"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    def text(self, hidden: frozenset[int] = frozenset()) -> str:
        """The text of all tokens except the `hidden` ones."""
        shown = (each for each in self.tokens if each.token_id not in hidden)
        return b"".join(_bytes(each) for each in shown).decode("utf-8", "replace")

    def rank(self, num_prompt: int, penalty: float) -> float:
        return float(self.score / (num_prompt + len(self.tokens)) ** penalty)

    def extended(self, sampled: TokenText, choice: TokenText | TopLogprob) -> "Beam":
        """This beam and one more token: `choice`, which is an alternative to `sampled`."""
        token = msgspec.structs.replace(
            sampled,
            token=choice.token,
            token_bytes=choice.token_bytes,
            logprob=choice.logprob,
            token_id=choice.token_id,
        )
        return Beam(self.score + choice.logprob, (*self.tokens, token))

    def ended(self, logprob: float) -> "Beam":
        return Beam(self.score + logprob, self.tokens, "stop")


class BeamSearch:
    """Opens a request as a beam search. Its choices are the best beams."""

    def __init__(self, backend: InferenceBackend, rules: BeamRules) -> None:
        self._backend = backend
        self._rules = rules

    async def open(self, request: ChatRequest | CompletionRequest) -> AsyncIterator[Event]:
        prompt = await self._prompt(request)
        if request.context.on_prompt is not None:
            request.context.on_prompt(prompt)
        return self._events(prompt, request.context)

    async def beams(
        self, request: ChatRequest | CompletionRequest
    ) -> tuple[tuple[int, ...], list[Beam]]:
        """The tokens of the prompt, and the best beams after it."""
        prompt = await self._prompt(request)
        return prompt, (await self._search(prompt, request.context))[0]

    async def _prompt(self, request: ChatRequest | CompletionRequest) -> tuple[int, ...]:
        model = request.context.model
        prompt = await self._tokens(request, model)
        resolved = self._backend.resolve(model or None)
        assert resolved is not None, model
        check_context(len(prompt), self._rules.max_tokens, resolved.card.max_model_len, "prompt")
        return prompt

    async def _tokens(
        self, request: ChatRequest | CompletionRequest, model: str
    ) -> tuple[int, ...]:
        if isinstance(request, ChatRequest):
            if any("images" in message for message in request.messages):
                raise InvalidRequestError(
                    "Beam search takes no images; leave use_beam_search out.",
                    param="use_beam_search",
                )
            return await self._backend.tokenize(request, model=model)
        if not isinstance(request.prompt, str):
            return request.prompt
        return await self._backend.tokenize(
            request.prompt,
            model=model,
            add_special_tokens=request.add_special_tokens,
            parse_special=request.parse_special,
        )

    async def _events(
        self, prompt: tuple[int, ...], context: GenerationContext
    ) -> AsyncGenerator[Event, None]:
        beams, cached = await self._search(prompt, context)
        hidden = await self._control_tokens(context)
        for choice, beam in enumerate(beams):
            ids, logprobs = beam.token_ids, None
            if context.params.logprobs is not None:
                logprobs = beam.tokens
            yield TextEvent(choice, beam.text(hidden), len(ids), logprobs, ids)
            yield FinishEvent(choice, beam.finish_reason)
        num_tokens = sum(len(beam.tokens) for beam in beams)
        yield UsageEvent(len(prompt), num_tokens, cached)

    async def _control_tokens(self, context: GenerationContext) -> frozenset[int]:
        if not context.params.skip_special_tokens:
            return frozenset()
        info = await self._backend.tokenizer_info(model=context.model)
        return frozenset(info.special_tokens.values()) if info is not None else frozenset()

    async def _search(
        self, prompt: tuple[int, ...], context: GenerationContext
    ) -> tuple[list[Beam], int]:
        """The best beams, best first, and how many tokens of the prompt were cached."""
        rules = self._rules
        info = await self._backend.tokenizer_info(model=context.model)
        end = None if info is None or rules.ignore_eos else info.eos_token_id
        num_top = 2 * rules.width if info is None else min(2 * rules.width, info.vocab_size)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_top, ignore_eos=True)
        silent = dict.fromkeys(("on_prompt", "on_progress", "on_wait", "on_captured"))
        context = msgspec.structs.replace(context, params=params, **silent)
        live, ended, cached = [Beam()], list[Beam](), 0
        for step in range(rules.max_tokens):
            answers = await asyncio.gather(
                *(self._next(prompt, beam, context, f"{step}-{i}") for i, beam in enumerate(live))
            )
            if step == 0:
                cached = answers[0][1]
            grown: list[Beam] = []
            for beam, (sampled, _) in zip(live, answers, strict=True):
                for each in _alternatives(sampled):
                    if each.token_id == end:
                        ended.append(beam.ended(each.logprob))
                    else:
                        grown.append(beam.extended(sampled, each))
            live = sorted(grown, key=lambda beam: -beam.score)[: rules.width]
            if rules.early_stopping and len(ended) >= rules.width:
                live = []
                break
        ranked = sorted(
            [*ended, *live], key=lambda beam: -beam.rank(len(prompt), rules.length_penalty)
        )
        return ranked[: rules.num_returned], cached

    async def _next(
        self, prompt: tuple[int, ...], beam: Beam, context: GenerationContext, name: str
    ) -> tuple[TokenText, int]:
        """The next token of a beam with its alternatives, and the number of cached tokens."""
        step = msgspec.structs.replace(context, request_id=f"{context.request_id}-{name}")
        request = CompletionRequest(context=step, prompt=(*prompt, *beam.token_ids))
        source = await self._backend.open(request)
        token, cached = None, 0
        try:
            async for event in source:
                if isinstance(event, TextEvent) and event.logprobs:
                    token = event.logprobs[-1]
                elif isinstance(event, UsageEvent):
                    cached = event.cached_tokens
        finally:
            await close_events(source)
        if token is None or token.token_id < 0:
            raise InvalidRequestError(
                "This model's backend does not report token ids, which beam search needs.",
                param="use_beam_search",
            )
        return token, cached


def _alternatives(sampled: TokenText) -> Sequence[TokenText | TopLogprob]:
    others = [each for each in sampled.top if each.token_id != sampled.token_id]
    return [sampled, *others]


def _bytes(token: TokenText) -> bytes:
    return token.token_bytes or token.token.encode()
