"""Endpoints that generate text, each with what a request needs and where it has its parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from engine.servers.anthropic import schema as anthropic
from engine.servers.huggingface.schema import TextGenerationBody
from engine.servers.kserve.schema import TextBody
from engine.servers.llamacpp.schema import InfillBody, NativeBody
from engine.servers.ollama.schema import OllamaChatBody, OllamaGenerateBody
from engine.servers.openai.schema import (
    ChatBody,
    CompletionBody,
    FimBody,
    GenerateBody,
)
from engine.servers.responses.schema import ResponseBody
from engine.servers.schema.body import parse_body
from engine.servers.sglang_api.schema import SglangGenerateBody
from engine.servers.vllm_api.batch_chat import BatchChatBody, parse_bodies

MESSAGES = [{"role": "user", "content": "one two"}]


def _parse_message(raw: dict[str, Any]) -> Any:
    return anthropic.parse(anthropic.MessagesBody, raw)


@dataclass(frozen=True)
class Endpoint:
    name: str
    path: str
    kind: type[BaseModel]
    needed: dict[str, Any]
    inside: str = ""  # the object that other servers' clients put parameters into
    limit: str = "max_tokens"  # its name for the length of an answer
    default_limit: int | None = None
    # What its server uses where neither the request nor the preset says anything.
    defaults: dict[str, float] = field(default_factory=dict)
    parse: Callable[[dict[str, Any]], Any] | None = None

    def body(self, given: dict[str, Any]) -> dict[str, Any]:
        """A request with these parameters."""
        return self.needed | given

    def check(self, given: dict[str, Any]) -> Any:
        """Validate a request as the endpoint does."""
        raw = self.body(given)
        return parse_body(self.kind, raw) if self.parse is None else self.parse(raw)


LLAMACPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
OLLAMA = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
QUIET = {"stream": False}
CHAT = Endpoint("chat", "/v1/chat/completions", ChatBody, {"messages": MESSAGES})
COMPLETIONS = Endpoint(
    "completions", "/v1/completions", CompletionBody, {"prompt": "one two"}, default_limit=16
)
ENDPOINTS = (
    CHAT,
    COMPLETIONS,
    Endpoint("fim", "/v1/fim/completions", FimBody, {"prompt": "one two"}),
    Endpoint(
        *("generate", "/generate", GenerateBody, {"prompt": "one two", "stream": True}),
        default_limit=16,
    ),
    Endpoint(
        *("sglang", "/generate", SglangGenerateBody, {"text": "one two"}),
        inside="sampling_params",
        default_limit=128,
    ),
    Endpoint(
        *("huggingface", "/generate", TextGenerationBody),
        # With it, the default of the temperature is that of all other endpoints.
        {"inputs": "one two", "do_sample": True},
        inside="parameters",
        default_limit=100,
    ),
    Endpoint(
        *("responses", "/v1/responses", ResponseBody, {"input": "one two", "store": False}),
        limit="max_output_tokens",
    ),
    Endpoint(
        *("messages", "/v1/messages", anthropic.MessagesBody),
        {"messages": MESSAGES, "max_tokens": 9},
        parse=_parse_message,
    ),
    Endpoint(
        *("llamacpp", "/completion", NativeBody, {"prompt": "one two"}),
        limit="n_predict",
        defaults=LLAMACPP,
    ),
    Endpoint(
        *("infill", "/infill", InfillBody, {"input_prefix": "one", "input_suffix": "two"}),
        limit="n_predict",
        defaults=LLAMACPP,
    ),
    Endpoint(
        *("ollama chat", "/api/chat", OllamaChatBody, {"messages": MESSAGES} | QUIET),
        inside="options",
        limit="num_predict",
        defaults=OLLAMA,
    ),
    Endpoint(
        *("ollama generate", "/api/generate", OllamaGenerateBody, {"prompt": "one two"} | QUIET),
        inside="options",
        limit="num_predict",
        defaults=OLLAMA,
    ),
    Endpoint(
        *("kserve", "/v2/models/{model}/generate", TextBody, {"text_input": "one two"}),
        default_limit=16,
    ),
    Endpoint(
        *("batch chat", "/v1/chat/completions/batch", BatchChatBody, {"messages": [MESSAGES]}),
        parse=lambda raw: parse_bodies(raw, lambda reading: None),
    ),
)
