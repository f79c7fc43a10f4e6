"""Requests with one or several prompts and no template: opens them all on the backend."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from engine.core.interfaces.backend import CompletionRequest, GrammarSpec, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.schema.body import SamplingBody
from engine.servers.schema.fields import Prompt
from engine.servers.serving.admission import Ticket
from engine.servers.serving.chat import NO_TEXT, require_grammar
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.generation_context import context_of_prompt, generation_context
from engine.servers.serving.services import Services, new_completion_id
from engine.servers.serving.special_tokens import parses_special


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
    context = generation_context(
        services, request, card, body, prompts.params, backend_id, prompts.grammar
    )
    asked = [
        CompletionRequest(
            context=context_of_prompt(context, index),
            prompt=prompt,
            parse_special=parses,
            echo=prompts.echo,
        )
        for index, prompt in enumerate(prompts.texts)
    ]
    pump = await services.begin(ticket, prompts.params, len(asked))
    pump.watch(request.receive)
    pump.read(await pump.open(services.backend, asked))
    return pump
