"""POST /completion, also as /completions, and /infill. They are whole or streamed.

Each prompt becomes a separate backend request, as in `/v1/completions`. Prompts are tokenized here,
because they may mix texts and token ids, and because an answer that is longer than the context ends
at its end instead of being refused.
"""

import functools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import (
    CompletionRequest,
    Event,
    ModelCard,
    TokenizerInfo,
    UsageEvent,
)
from engine.servers.http.errors import problem
from engine.servers.llamacpp.format import Asked, NativeStream, answers, settings_body
from engine.servers.llamacpp.schema import Extra, InfillBody, NativeBody, NativeSampling, Parts
from engine.servers.openai.completions import NO_SUFFIX
from engine.servers.openai.format import collect
from engine.servers.openai.reports import ReportingStream
from engine.servers.openai.token_fields import allowed_alternatives
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.generation import NO_TEXT, Follow, open_generation, require_grammar
from engine.servers.serving.services import Services, json_bytes, new_completion_id
from engine.servers.serving.sse import StreamFormat, answer_streaming

_encode = msgspec.json.encode
# Tokens that a prompt for filling in may have besides its texts.
MAX_MARKERS = 4


def add_completion_routes(app: FastAPI, services: Services) -> None:
    @app.post("/completions")
    @app.post("/completion")
    async def completion(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Continue one or several prompts."""
        body = await services.read(request, NativeBody)
        card = services.choose_model(request, body.model)
        services.require(card, "completions", "prompt", NO_TEXT)
        prompts = await Prompts.read(services, card, body.prompt)
        return await _answer(services, request, ticket, body, card, prompts)

    @app.post("/infill")
    async def infill(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Fill in the text between a prefix and a suffix."""
        body = await services.read(request, InfillBody)
        card = services.choose_model(request, body.model)
        services.require(card, "suffix", "input_suffix", NO_SUFFIX)
        # The model writes the rest of the gap, so its beginning is part of the prefix.
        prefix = _files(body.input_extra or ()) + body.input_prefix + (body.prompt or "")
        prompts = await Prompts.around_gap(services, card, prefix, body.input_suffix)
        return await _answer(services, request, ticket, body, card, prompts)


def _files(extra: Sequence[Extra]) -> str:
    return "".join(f"{each.filename}\n{each.text}\n" for each in extra)


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a request. `texts` are their texts, with the names of control tokens."""

    prompts: tuple[str | tuple[int, ...], ...]
    texts: tuple[str, ...]
    longest: int | None  # number of tokens; None if the backend gives no access to its tokenizer
    info: TokenizerInfo | None
    suffix: str | None = None

    @classmethod
    async def read(
        cls, services: Services, card: ModelCard, prompts: tuple[Parts, ...]
    ) -> "Prompts":
        info = await services.backend.tokenizer_info(model=card.id)
        if info is None:
            texts = tuple(_text(parts, index) for index, parts in enumerate(prompts))
            return cls(texts, texts, None, None)
        ids = [await joined(services, card, parts) for parts in prompts]
        shown = [await services.backend.detokenize(each, model=card.id) for each in ids]
        return cls(tuple(ids), tuple(shown), max(map(len, ids)), info)

    @classmethod
    async def around_gap(
        cls, services: Services, card: ModelCard, prefix: str, suffix: str
    ) -> "Prompts":
        info = await services.backend.tokenizer_info(model=card.id)
        longest = None
        if info is not None:
            parts = [await joined(services, card, (each,)) for each in (prefix, suffix)]
            longest = sum(map(len, parts)) + MAX_MARKERS
        return cls((prefix,), (prefix,), longest, info, suffix)


def _text(parts: Parts, index: int) -> str:
    if len(parts) > 1 or not isinstance(parts[0], str):
        raise problem(f"prompt[{index}]", "should be text, for this backend takes no token ids")
    return parts[0]


async def joined(services: Services, card: ModelCard, parts: Parts) -> tuple[int, ...]:
    """The token ids of a prompt of texts and ids. As in llama.cpp, names of control tokens become
    these tokens, and a BOS is added if the prompt starts with a text.
    """
    ids: list[int] = []
    for position, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
            continue
        ids += await services.backend.tokenize(
            part, model=card.id, add_special_tokens=position == 0, parse_special=True
        )
    return tuple(ids)


async def _biases(services: Services, card: ModelCard, body: NativeSampling) -> dict[int, float]:
    """The biases by token id. A text's bias holds for all of its tokens."""
    biases: dict[int, float] = {}
    for token, bias in body.logit_bias.items():
        if isinstance(token, int):
            biases[token] = bias
            continue
        ids = await services.backend.tokenize(
            token, model=card.id, add_special_tokens=False, parse_special=True
        )
        biases |= dict.fromkeys(ids, bias)
    return biases


class _Usages:
    """Keeps the usage of each prompt, because the pump only adds them up. Empty if there is only
    one prompt.
    """

    def __init__(self, num_prompts: int) -> None:
        self.all: list[UsageEvent] = []
        self.follow: Follow | None = self._follow if num_prompts > 1 else None

    def _follow(self, source: AsyncIterator[Event]) -> AsyncIterator[Event]:
        self.all.append(UsageEvent(prompt_tokens=0, completion_tokens=0, cached_tokens=0))
        return self._noting(source, len(self.all) - 1)

    async def _noting(self, source: AsyncIterator[Event], index: int) -> AsyncIterator[Event]:
        async for event in source:
            if isinstance(event, UsageEvent):
                self.all[index] = event
            yield event


def _stream(body: NativeSampling, stream: NativeStream, pump: EventPump) -> StreamFormat:
    if not body.reports_progress:
        return stream
    return ReportingStream(
        stream,
        stream,
        pump,
        with_progress=bool(body.return_progress),
        with_timings=bool(body.timings_per_token),
    )


async def _answer(
    services: Services,
    request: Request,
    ticket: Ticket,
    body: NativeSampling,
    card: ModelCard,
    prompts: Prompts,
) -> Response:
    require_grammar(services, card, body.grammar)
    room = None if prompts.longest is None else card.max_model_len - prompts.longest
    params = body.params(card, room, await _biases(services, card, body))
    await allowed_alternatives(services, card, "n_probs", params.logprobs)
    completion_id = new_completion_id("cmpl")
    count = len(prompts.prompts)
    usages = _Usages(count)
    pump = await open_generation(
        *(services, request, ticket, card, body, params, completion_id),
        [
            functools.partial(
                CompletionRequest, prompt=prompt, suffix=prompts.suffix, parse_special=True
            )
            for prompt in prompts.prompts
        ],
        grammar=body.grammar,
        follow=usages.follow,
    )
    eos_id = None if prompts.info is None else prompts.info.eos_token_id
    told = Asked(
        card=card,
        settings=settings_body(params, body.limit(card), eos_id) | {"stream": bool(body.stream)},
        prompts=prompts.texts,
        num_choices=params.n,
        returns_tokens=bool(body.return_tokens),
        writes_nothing=body.writes_nothing,
        response_fields=tuple(body.response_fields or ()),
    )
    if body.stream:
        return await answer_streaming(
            pump, _stream(body, NativeStream(told, pump, usages.all), pump)
        )
    collected = await collect(pump, count * params.n)
    made = answers(told, collected.choices, pump, usages.all)
    return json_bytes(_encode(made if len(made) > 1 else made[0]))
