"""POST /tokenize and /detokenize in the formats of vLLM and llama.cpp, and GET /tokenizer_info.

A conversation is rendered exactly as for `/v1/chat/completions`. If a prompt contains the name of a
control token, such as `<|im_end|>`, this name is tokenized as plain text, unless `parse_special` is
set.
"""

from typing import Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema, model_validator
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import NotFoundError
from engine.core.interfaces.backend import (
    ChatRequest,
    GenerationContext,
    ModelCard,
    TokenizerInfo,
    ToolChoice,
)
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import describe, problem
from engine.servers.http.listing import Query, parse_query
from engine.servers.http.request_log import record_of
from engine.servers.openai.schema import ChatPromptBody
from engine.servers.schema import fields
from engine.servers.schema.body import parse_body
from engine.servers.serving.admission import Ticket
from engine.servers.serving.generation import (
    check_tools,
    known_options,
    loaded_messages,
    with_preset_options,
    with_system,
)
from engine.servers.serving.prompts import parses_special
from engine.servers.serving.services import Services, json_response

MAX_IDS = 2**20
# Max number of different tokens that are returned as text. Each of them takes one call of the
# backend.
MAX_TOKEN_STRS = 65_536


def _parse_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_IDS:
        rule = f"should be a list of at most {MAX_IDS} token ids"
        raise problem("tokens", f"{rule}, got {describe(value)}")
    for position, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= fields.MAX_TOKEN_ID:
            rule = f"should be an integer from 0 to {fields.MAX_TOKEN_ID}, got {describe(item)}"
            raise problem(f"tokens[{position}]", rule)
    return tuple(value)


_IDS_SCHEMA = {
    "type": "array",
    "maxItems": MAX_IDS,
    "items": {"type": "integer", "minimum": 0, "maximum": fields.MAX_TOKEN_ID},
}


class TokenizeBody(ChatPromptBody):
    """The body has either a `prompt`, or `messages` with their options."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise problem("prompt", "send either a prompt or messages")
        if self.messages is None:
            of_messages = {
                "tools": self.tools,
                "add_generation_prompt": self.add_generation_prompt,
                "continue_final_message": self.continue_final_message,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
            misplaced = [name for name, value in of_messages.items() if value]
            if misplaced:
                raise problem(misplaced[0], "goes with messages, not with a prompt")
            return self
        if self.add_special_tokens:
            raise problem("add_special_tokens", "goes with a prompt; a template adds its own")
        if self.parse_special:
            raise problem("parse_special", "goes with a prompt; a template has its own tokens")
        return self


class ContentBody(BaseModel):
    """llama.cpp's form of the body, with its defaults."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    model: fields.ModelName | None = None
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


def _parse_tokenize(raw: dict[str, Any]) -> TokenizeBody | ContentBody:
    """Parse the body of `/tokenize`. llama.cpp's form has a `content`."""
    return parse_body(ContentBody, raw) if "content" in raw else parse_body(TokenizeBody, raw)


class TokenizerQuery(Query):
    model: fields.ModelName | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    model: fields.ModelName | None = None
    tokens: Annotated[tuple[int, ...], PlainValidator(_parse_ids), WithJsonSchema(_IDS_SCHEMA)]


def add_tokenize_routes(app: FastAPI, services: Services) -> None:
    @app.post("/tokenize")
    async def tokenize(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Return the token ids of a text or a conversation."""
        body = await services.read_as(request, _parse_tokenize)
        card = services.choose_model(request, body.model)
        if isinstance(body, ContentBody):
            return json_response(await content_body(services, card, body))
        if body.prompt is not None:
            ids = await services.backend.tokenize(
                body.prompt,
                model=card.id,
                add_special_tokens=body.add_special_tokens is not False,
                parse_special=await parses_special(
                    services, request, card, body.parse_special, [body.prompt]
                ),
            )
        else:
            chat = await chat_of(services, request, body, card)
            ids = await services.backend.tokenize(chat, model=card.id)
        strings = await _token_strings(services, card, ids) if body.return_token_strs else None
        return json_response(
            {
                "count": len(ids),
                "max_model_len": card.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    @app.post("/detokenize")
    async def detokenize(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Return the text of token ids."""
        body = await services.read(request, DetokenizeBody)
        card = services.choose_model(request, body.model)
        text = await services.backend.detokenize(body.tokens, model=card.id) if body.tokens else ""
        # vLLM's name of the text, and llama.cpp's.
        return json_response({"prompt": text, "content": text})

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        """Describe the tokenizer of the only model, or of the model in the query."""
        card = services.choose_model(request, parse_query(TokenizerQuery, request).model)
        info = await services.backend.tokenizer_info(model=card.id)
        if info is None:
            raise NotFoundError(f"The backend of {card.id} does not name its tokenizer.")
        return json_response(tokenizer_body(info, card))


def tokenizer_body(info: TokenizerInfo, card: ModelCard) -> dict[str, Any]:
    """The fields of a tokenizer's configuration at Hugging Face that clients read."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": card.max_model_len,
        "vocab_size": info.vocab_size,
        "bos_token": info.bos_token,
        "bos_token_id": info.bos_token_id,
        "eos_token": info.eos_token,
        "eos_token_id": info.eos_token_id,
        "chat_template": info.chat_template,
        "additional_special_tokens": list(info.special_tokens),
        "added_tokens_decoder": {
            str(token_id): {"content": name, "special": True}
            for name, token_id in info.special_tokens.items()
        },
    }


async def content_body(services: Services, card: ModelCard, body: ContentBody) -> dict[str, Any]:
    ids = await services.backend.tokenize(
        body.content,
        model=card.id,
        add_special_tokens=bool(body.add_special),
        parse_special=body.parse_special is not False,
    )
    if not body.with_pieces:
        return {"tokens": ids}
    pieces = await services.backend.token_bytes(ids, model=card.id)
    return {
        "tokens": [
            {"id": token, "piece": _piece(piece)} for token, piece in zip(ids, pieces, strict=True)
        ]
    }


def _piece(piece: bytes) -> str | list[int]:
    """A token's text. If the token is part of a character, its bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def chat_of(
    services: Services, request: Request, body: ChatPromptBody, card: ModelCard
) -> ChatRequest:
    """The backend's request for a conversation that is only tokenized."""
    services.require(card, "chat", "messages", "has no chat template; send a prompt")
    check_tools(services, request, card, body.tools)
    if services.answers_as_llamacpp(request):
        body = body.with_begun_answer()
    return ChatRequest(
        context=GenerationContext(
            request_id=record_of(request.scope).request_id, params=SamplingParams()
        ),
        messages=with_system(card, await loaded_messages(services, card, body.messages or ())),
        tools=body.tools,
        tool_choice=ToolChoice("auto" if body.tools else "none"),
        template_options=with_preset_options(
            card, known_options(services, request, card, body.chat_template_kwargs)
        ),
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


async def _token_strings(services: Services, card: ModelCard, ids: tuple[int, ...]) -> list[str]:
    distinct = set(ids)
    if len(distinct) > MAX_TOKEN_STRS:
        rule = f"is for at most {MAX_TOKEN_STRS} different tokens, and these are {len(distinct)}"
        raise problem("return_token_strs", rule)
    strings = {each: await services.backend.detokenize((each,), model=card.id) for each in distinct}
    return [strings[each] for each in ids]
