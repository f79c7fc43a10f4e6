"""Decodes the parts of a server's responses that we use.

The same types are used for streams and complete answers, and for chats and completions, because
these differ only in a few names: `delta`, `message` and `text`. Unknown fields are skipped. Almost
all fields may be missing or null.
"""

from typing import Any

import msgspec


class WireTop(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class WireToken(msgspec.Struct):
    token: str = ""
    id: int | None = None  # only llama-server sends it
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[WireTop] | None = None


class WireLogprobs(msgspec.Struct):
    """Logprobs of a chat (`content`), or of a completion (the other fields, which are parallel
    lists).
    """

    content: list[WireToken] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None
    text_offset: list[int] | None = None


class WireFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class WireCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: WireFunction | None = None


class WireDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[WireCall] | None = None


class WireChoice(msgspec.Struct):
    index: int = 0
    delta: WireDelta | None = None
    message: WireDelta | None = None
    text: str | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None  # SGLang's name of `stop_reason`
    token_ids: list[int] | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class WireUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Verbose(msgspec.Struct):
    stopping_word: str | None = None


class WireChunk(msgspec.Struct):
    choices: list[WireChoice] | None = None
    usage: WireUsage | None = None
    # only llama-server sends it
    verbose: Verbose | None = msgspec.field(default=None, name="__verbose")
    # An error in any of the common forms: an object, a text, or fields of the chunk itself.
    error: Any = None
    object: str | None = None
    message: Any = None


class WireVector(msgspec.Struct):
    embedding: str | list[float]  # base64 of float32, or numbers
    index: int | None = None


class WireEmbeddings(msgspec.Struct):
    data: list[WireVector]
    usage: WireUsage | None = None


class ModelMeta(msgspec.Struct):
    """Model metadata that llama-server and our own server send."""

    n_ctx_train: int | None = None
    n_vocab: int | None = None
    n_params: int | None = None
    size: int | None = None


class WireModel(msgspec.Struct):
    id: str
    created: int | None = None
    owned_by: str | None = None
    max_model_len: int | None = None
    context_length: int | None = None
    context_window: int | None = None
    quantization: str | None = None
    meta: ModelMeta | None = None


class WireModels(msgspec.Struct):
    data: list[WireModel] | None = None


decode_chunk = msgspec.json.Decoder(WireChunk).decode
decode_embeddings = msgspec.json.Decoder(WireEmbeddings).decode
decode_models = msgspec.json.Decoder(WireModels).decode
