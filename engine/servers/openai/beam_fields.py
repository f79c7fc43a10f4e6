"""vLLM's parameters of beam search, of chats and completions."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request

from engine.backends.beam_search import BeamRules, BeamSearch
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import GrammarSpec, ModelCard
from engine.core.interfaces.request import TRUNCATING_FIELDS, SamplingParams
from engine.servers.http.errors import problem
from engine.servers.schema.body import SamplingBody
from engine.servers.serving.services import Services

if TYPE_CHECKING:
    from engine.servers.openai.schema import ChatBody, CompletionBody
    from engine.servers.serving.interp_opening import InterpOpener

MAX_WIDTH = 20
# Parameters that can't be followed, because beam search does not sample. With any of them, the
# search would return other texts than the client asked for.
_EXCLUDED = (
    *("stream", "stop", "stop_token_ids", "min_tokens", "logit_bias", "truncate_prompt_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
# Parameters that would only change what is sampled.
_IDLE = ("temperature", *TRUNCATING_FIELDS, "seed")


class BeamBody(SamplingBody):
    use_beam_search: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_WIDTH)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | None = None

    def check_beams(self, grammar: GrammarSpec | None, *others: str) -> None:
        """Check these parameters. `others` are further parameters that can't be combined with beam
        search, and that the request has.
        """
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1.0):
                raise problem("length_penalty", "is only allowed with use_beam_search")
            if self.early_stopping:
                raise problem("early_stopping", "is only allowed with use_beam_search")
            return
        excluded = [name for name in _EXCLUDED if getattr(self, name)] + list(others)
        if grammar is not None:
            excluded.append(grammar.param)
        if excluded:
            raise problem(excluded[0], "is not supported with use_beam_search")

    def rules(self, params: SamplingParams) -> BeamRules:
        if params.max_tokens is None:
            raise InvalidRequestError(
                "Beam search needs max_tokens, the number of its steps.", param="max_tokens"
            )
        return BeamRules(
            max(self.best_of or 1, self.num_choices),
            params.max_tokens,
            self.num_choices,
            1.0 if self.length_penalty is None else self.length_penalty,
            bool(self.ignore_eos),
            bool(self.early_stopping),
        )


def beam_search(
    services: Services,
    request: Request,
    body: BeamBody,
    params: SamplingParams,
) -> BeamSearch | None:
    """The search that a request asks for. None if it asks for none. Warns the client about
    parameters that have no effect.
    """
    if not body.use_beam_search:
        return None
    rules = body.rules(params)
    for name in _IDLE:
        if getattr(body, name) not in (None, 0):
            services.warn(request, name, "has no effect on a beam search")
    return BeamSearch(services.backend, rules)


def special_opener(
    services: Services,
    request: Request,
    body: "ChatBody | CompletionBody",
    card: ModelCard,
    params: SamplingParams,
    num_prompts: int = 1,
) -> "BeamSearch | InterpOpener | None":
    """What takes the request in the backend's place, if the request searches beams, or reads or
    changes activations.
    """
    if body.interp is None:
        return beam_search(services, request, body, params)
    if body.use_beam_search:
        raise InvalidRequestError("interp is not supported with use_beam_search.", param="interp")
    from engine.servers.serving.interp_opening import (
        interp_opener,  # imported late: few requests have it
    )

    return interp_opener(services, request, card, body.interp, params, num_prompts)


async def interp_answer(opener: "BeamSearch | InterpOpener | None") -> dict[str, Any] | None:
    """What the request read inside the model, for its answer."""
    if opener is None or isinstance(opener, BeamSearch):
        return None
    return await opener.answer()
