"""vLLM's request parameters and answer fields about tokens: log-probabilities of the prompt, token
ids, and which text an answer has.
"""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import Field

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    ModelCard,
    TextEvent,
    TokenText,
    TopLogprob,
)
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import problem
from engine.servers.openai.logprobs import clamped
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody
from engine.servers.serving.services import Services

MAX_NAMED = 128
ALL = -1  # as a number of alternatives: all tokens of the vocabulary
# The server's setting `max_logprobs` has a lower limit.
AnyLogprobs = Annotated[int, Field(ge=ALL, le=2**20)]


class TokenBody(SamplingBody):
    """vLLM's parameters about tokens, of chats and completions."""

    prompt_logprobs: AnyLogprobs | None = None
    logprob_token_ids: Annotated[list[fields.TokenId], Field(max_length=MAX_NAMED)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    def check_tokens(self, num_top: int | None, echoes: bool) -> None:
        """Check these parameters. `num_top` is the number of alternatives per token, or None if the
        request wants no log-probabilities.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise problem("prompt_logprobs", "can't be streamed; set stream to false")
        if not self.logprob_token_ids:
            return
        if num_top is None:
            raise problem("logprob_token_ids", "is only allowed with logprobs")
        if echoes or self.prompt_logprobs is not None:
            rule = "can't be used with echo or prompt_logprobs"
            raise problem("logprob_token_ids", rule)

    def token_fields(self, num_top: int | None, echoes: bool) -> "TokenFields":
        return TokenFields(
            num_top,
            self.prompt_logprobs,
            has_logprobs=num_top is not None,
            has_ids=bool(self.return_token_ids),
            names_ids=bool(self.return_tokens_as_token_ids),
            shows_prompt=echoes,
            shows_stop=bool(self.include_stop_str_in_output),
        )


@dataclass(frozen=True, slots=True)
class TokenFields:
    """What an answer tells of its tokens. The backend may tell more alternatives to the prompt's
    tokens than a field needs, because an echo and `prompt_logprobs` may need different numbers.
    """

    num_top: int | None = None  # alternatives per token
    num_prompt_top: int | None = None  # the same in the field prompt_logprobs; None: no such field
    has_logprobs: bool = False
    has_ids: bool = False
    names_ids: bool = False  # a token's text is "token_id:" and its id
    shows_prompt: bool = False  # the answer's logprobs begin with those of the prompt
    shows_stop: bool = False  # the stop string that ended the text is part of it

    def answer(self, tokens: Sequence[TokenText]) -> list[TokenText]:
        """Tokens of the answer, in the form that the client wants."""
        return [_named(each) for each in tokens] if self.names_ids else list(tokens)

    def echo(self, tokens: Sequence[TokenText]) -> list[TokenText]:
        """Tokens of the prompt, if they are part of the answer."""
        return self._of_prompt(tokens, self.num_top) if self.shows_prompt else []

    def _of_prompt(self, tokens: Sequence[TokenText], num_top: int | None) -> list[TokenText]:
        most = None if num_top == ALL else num_top
        cut = [msgspec.structs.replace(each, top=each.top[:most]) for each in tokens]
        return self.answer(cut)

    def prompt_logprobs(self, tokens: Sequence[TokenText]) -> list[dict[str, Any] | None] | None:
        """vLLM's field of this name: for each token, itself and its alternatives by token id."""
        if self.num_prompt_top is None:
            return None
        return [
            None if math.isnan(each.logprob) else _by_id(each)
            for each in self._of_prompt(tokens, self.num_prompt_top)
        ]


NO_FIELDS = TokenFields()


def _named(token: TokenText) -> TokenText:
    top = tuple(
        msgspec.structs.replace(each, token=f"token_id:{each.token_id}") for each in token.top
    )
    return msgspec.structs.replace(token, token=f"token_id:{token.token_id}", top=top)


def _by_id(token: TokenText) -> dict[str, Any]:
    """The rank of a token is only known if the token is one of the alternatives."""
    ranks = {each.token_id: rank for rank, each in enumerate(token.top, 1)}
    alternatives: list[TokenText | TopLogprob] = [token, *token.top]
    return {
        str(each.token_id): {
            "logprob": clamped(each.logprob),
            "rank": ranks.get(each.token_id),
            "decoded_token": each.token,
        }
        for each in alternatives
    }


async def with_token_params(
    services: Services, card: ModelCard, body: TokenBody, params: SamplingParams
) -> SamplingParams:
    """The sampling parameters with those of `body`. Raises if the request wants more alternatives
    than the setting `server.max_logprobs` allows.
    """
    logprobs = await allowed_alternatives(services, card, "logprobs", params.logprobs)
    of_prompt = await allowed_alternatives(services, card, "prompt_logprobs", body.prompt_logprobs)
    if of_prompt is not None and params.score_prompt:  # the prompt is also echoed
        of_prompt = max(of_prompt, logprobs or 0)
    return msgspec.structs.replace(
        params,
        logprobs=logprobs,
        score_prompt=params.score_prompt or of_prompt is not None,
        prompt_logprobs=of_prompt,
        logprob_token_ids=tuple(body.logprob_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


async def allowed_alternatives(
    services: Services, card: ModelCard, name: str, wanted: int | None
) -> int | None:
    """The number of alternatives per token. Raises if the server does not allow so many."""
    if wanted is None:
        return None
    most = services.settings.server.max_logprobs
    if wanted == ALL:
        info = await services.backend.tokenizer_info(model=card.id)
        if info is None:
            what = f"the backend of {card.id} does not report the size of its vocabulary"
            raise InvalidRequestError(f"{name} can't be -1 here: {what}.", param=name)
        wanted = info.vocab_size
    if most != ALL and wanted > most:
        raise InvalidRequestError(
            f"{name} asks for {wanted} alternatives per token. This server allows {most}; its"
            " setting server.max_logprobs raises that.",
            param=name,
        )
    return wanted


async def adapted(
    source: AsyncIterator[Event], tokens: TokenFields, echo: str = "", num_choices: int = 1
) -> AsyncIterator[Event]:
    """The events of `source`, with `echo` before each choice. The prompt's text is left out if the
    answer does not show it. A stop string that the answer shows is an event of its own.
    """
    for choice in range(num_choices if echo else 0):
        yield TextEvent(choice, echo, 0)
    async for event in source:
        if isinstance(event, FinishEvent) and tokens.shows_stop:
            if isinstance(event.stop_reason, str):
                yield TextEvent(event.choice, event.stop_reason, 0)
        elif isinstance(event, TextEvent) and _is_prompt(event) and not tokens.shows_prompt:
            event = msgspec.structs.replace(event, text="")
        yield event


def _is_prompt(event: TextEvent) -> bool:
    return not event.num_tokens and event.logprobs is not None
