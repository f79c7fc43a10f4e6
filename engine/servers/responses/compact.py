"""/v1/responses/compact: replaces a long conversation by a summary, which the model itself writes.

The summary is an item of type `compaction`. As input of a later request, it becomes part of the
system message. OpenAI encrypts the summary; here its field `encrypted_content` is plain text.
"""

import secrets
from typing import Any

from starlette.requests import Request

from engine.core.errors import InferenceError
from engine.core.interfaces.backend import ModelCard, TextEvent
from engine.servers.access.auth import principal_of
from engine.servers.files.expiry import unix_now
from engine.servers.http.errors import problem
from engine.servers.responses.create import Messages, ResponseMaker
from engine.servers.responses.format import usage_body
from engine.servers.responses.items import Item, item_id
from engine.servers.responses.schema import CompactBody
from engine.servers.responses.store import PREFIX
from engine.servers.schema.body import SamplingBody
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import OutputEvent
from engine.servers.serving.generation import (
    ChatInput,
    chat_model,
    open_chat,
    thinking_switch,
    warn_of_cache_key,
)
from engine.servers.serving.services import Services

MAX_SUMMARY_TOKENS = 1_024
REQUEST = (
    "Summarize our conversation so far, so that it can be continued from the summary alone. Keep"
    " every fact, name, number, decision and open question that may matter later, and what I asked"
    " for. Answer with the summary only."
)


async def compact(
    services: Services, maker: ResponseMaker, request: Request, body: CompactBody, ticket: Ticket
) -> Item:
    card = chat_model(services, request, body.model, "input")
    warn_of_cache_key(services, request, body.prompt_cache_key)
    prompt = await maker.prompt(body, principal_of(request).name)
    if all(message["role"] == "system" for message in prompt.messages):
        raise problem("input", "is needed, or previous_response_id")
    ask = ChatInput(
        card, _asking_for_summary(prompt.messages), template_options=thinking_switch(card, False)
    )
    response_id = PREFIX + secrets.token_hex(16)
    sampling = SamplingBody(temperature=0)
    params = sampling.sampling(card, _max_tokens(card), None)
    pump = await open_chat(services, request, ticket, ask, sampling, params, response_id)
    texts: list[str] = []

    def add(events: list[OutputEvent]) -> None:
        texts.extend(event.text for event in events if isinstance(event, TextEvent))

    await pump.wait_whole(add)
    summary = "".join(texts).strip()
    if not summary:
        raise InferenceError("The model wrote no summary. Begin a new conversation instead.")
    item = {
        "id": item_id("compaction", response_id, 0),
        "type": "compaction",
        "encrypted_content": summary,
    }
    return {
        "id": response_id,
        "object": "response.compaction",
        "created_at": unix_now(),
        "output": [item],
        "usage": usage_body(pump.usage),
    }


def _max_tokens(card: ModelCard) -> int:
    return max(1, min(MAX_SUMMARY_TOKENS, card.max_model_len // 4))


def _asking_for_summary(messages: Messages) -> Messages:
    """The conversation, with a request for its summary at the end. It becomes part of the last
    message if that is the user's, because some templates refuse two user messages in a row.
    """
    last: dict[str, Any] = messages[-1]
    if last["role"] != "user":
        return (*messages, {"role": "user", "content": REQUEST})
    return (*messages[:-1], last | {"content": f"{last['content']}\n\n{REQUEST}"})
