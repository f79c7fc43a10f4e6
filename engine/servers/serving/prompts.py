"""Requests with one or several prompts and no template: opens them all on the backend. Also tells
whether names of control tokens in a prompt become tokens.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from engine.core.interfaces.backend import CompletionRequest, GrammarSpec, ModelCard, TokenizerInfo
from engine.core.interfaces.request import SamplingParams
from engine.core.text.long_texts import after_other_long_texts
from engine.servers.access.auth import principal_of
from engine.servers.schema.body import SamplingBody
from engine.servers.schema.fields import Prompt
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.generation import NO_TEXT, open_generation, require_grammar
from engine.servers.serving.services import Services, new_completion_id

# Prompts up to this size are searched on the event loop.
INLINE_CHARACTERS = 8_192


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a request asks for. `field` is the name of the prompts in its body, and `prefix` is how
    its ids begin.
    """

    texts: Sequence[Prompt]
    field: str
    prefix: str
    params: SamplingParams
    grammar: GrammarSpec | None
    parse_special: bool | None
    echo: bool


async def open_prompts(
    services: Services,
    request: Request,
    ticket: Ticket,
    card: ModelCard,
    body: SamplingBody,
    prompts: Prompts,
) -> EventPump:
    """Check what the model can do, and start to generate."""
    services.require(card, "completions", prompts.field, NO_TEXT)
    require_grammar(services, card, prompts.grammar)
    parses = await parses_special(services, request, card, prompts.parse_special, prompts.texts)
    backend_id = new_completion_id(prompts.prefix)
    return await open_generation(
        *(services, request, ticket, card, body, prompts.params, backend_id),
        [
            functools.partial(
                CompletionRequest, prompt=prompt, parse_special=parses, echo=prompts.echo
            )
            for prompt in prompts.texts
        ],
        grammar=prompts.grammar,
    )


async def parses_special(
    services: Services,
    request: Request,
    card: ModelCard,
    asked: bool | None,
    texts: Sequence[object],
) -> bool:
    """Whether names of control tokens in the prompts `texts` become these tokens. If not, and a
    text has such a name, the client is warned. `asked` is the request's `parse_special`; the
    key's setting is its default.
    """
    parses = principal_of(request).parse_special if asked is None else asked
    if parses or asked is not None:
        return parses
    info = await services.backend.tokenizer_info(model=card.id)
    if info is None:
        return False
    for text in texts:
        if isinstance(text, str) and (found := await _control_token(text, info)) is not None:
            what = f"{found} in the prompt is read as text; set it to true for a control token"
            services.warn(request, "parse_special", what)
            break
    return False


async def _control_token(text: str, info: TokenizerInfo) -> str | None:
    """The first name of a control token in `text`."""

    def search() -> str | None:
        found = _control_tokens(tuple(info.special_tokens)).search(text)
        return None if found is None else found.group()

    if len(text) <= INLINE_CHARACTERS:
        return search()
    return await after_other_long_texts(search)


@functools.lru_cache(maxsize=16)
def _control_tokens(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
