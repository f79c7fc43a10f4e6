"""POST /v1/chat/completions/batch, vLLM's endpoint for several conversations with the same
parameters. Choice `i` of the answer is the answer to conversation `i`.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from engine.servers.http.errors import describe, problem
from engine.servers.openai.completions import chat_ask, chat_follow, whole_timings
from engine.servers.openai.format import chat_body, collect, new_envelope
from engine.servers.openai.schema import ChatBody
from engine.servers.openai.token_fields import with_token_params
from engine.servers.schema.body import parse_body
from engine.servers.schema.dialects.reading import Reading, asks_for_nothing
from engine.servers.serving.admission import Ticket
from engine.servers.serving.generation import chat_model, chat_prompt, open_generation
from engine.servers.serving.services import Services, json_bytes, new_completion_id

MAX_CONVERSATIONS = 128
# Parameters of chats that can't be used for several at once, with the values that are accepted.
_EXCLUDED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "tools": ((),),
    "use_beam_search": (False,),
    "echo": (False,),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "store": (False,),
    "verbose": (False,),
    "interp": (),
}


class BatchChatBody(ChatBody):
    """A chat body with a list of conversations. Only its schema is used."""

    messages: Annotated[  # type: ignore[assignment]
        list[list[dict[str, Any]]], Field(min_length=1, max_length=MAX_CONVERSATIONS)
    ]


def parse_bodies(raw: dict[str, Any], on_read: Callable[[Reading], None]) -> list[ChatBody]:
    """One chat body for each conversation. `on_read` is as in `parse_body`."""
    conversations = raw.get("messages")
    if not isinstance(conversations, list) or not 1 <= len(conversations) <= MAX_CONVERSATIONS:
        rule = f"should be a list of 1 to {MAX_CONVERSATIONS} conversations"
        raise problem("messages", f"{rule}, got {describe(conversations)}")
    first, *others = ({**raw, "messages": each} for each in conversations)
    bodies = [
        parse_body(ChatBody, first, on_read),
        *(parse_body(ChatBody, each) for each in others),
    ]
    for name, off in _EXCLUDED.items():
        if not asks_for_nothing(getattr(bodies[0], name), off):
            raise problem(name, "is not supported by this endpoint; use /v1/chat/completions")
    return bodies


def add_batch_chat_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/chat/completions/batch")
    async def batch_chat(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        on_read = functools.partial(services.note_words, request)
        bodies = await services.read_as(request, functools.partial(parse_bodies, on_read=on_read))
        body = bodies[0]
        card = chat_model(services, request, body.model, "messages")
        params = await with_token_params(services, card, body, body.params(card))
        completion_id = new_completion_id("chatcmpl")
        pump = await open_generation(
            *(services, request, ticket, card, body, params, completion_id),
            [
                await chat_prompt(services, request, chat_ask(services, request, each, card))
                for each in bodies
            ],
            grammar=body.grammar,
            follow=chat_follow(services, request, body),
        )
        collected = await collect(pump, len(bodies))
        envelope = new_envelope(completion_id, card)
        return json_bytes(
            chat_body(
                envelope,
                collected,
                pump.usage,
                tokens=body.tokens,
                metadata=body.metadata,
                reports=whole_timings(body, pump),
            )
        )
