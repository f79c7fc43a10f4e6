"""Ollama's request bodies. The parameters in `options` are fields of a body, because the table of
dialects converts them to parameters of this server. So they have the same bounds as in all APIs.
"""

import math
import re
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.core.interfaces.backend import GrammarSpec, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import describe, problem
from engine.servers.ollama.messages import parse_messages, with_images
from engine.servers.openai.embeddings import MAX_DIMENSIONS, MAX_INPUTS, VectorsBody
from engine.servers.openai.schema import NumLogprobs
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody, refused
from engine.servers.schema.structured import schema_spec

THINKING_LEVELS = ("low", "medium", "high", "max")
DEFAULT_WINDOW = 64  # the penalties of a request see this many tokens
MAX_SECONDS = 10**9
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)")
_OF_PRESET = "set it in [presets.ID] of the configuration file"
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


def _parse_format(value: Any) -> GrammarSpec | None:
    if value is None or value == "":
        return None
    if value == "json":
        return GrammarSpec(kind="json_object", param="format")
    if not isinstance(value, dict):
        raise problem("format", f'should be "json" or a JSON schema, got {describe(value)}')
    return schema_spec(value, "format", "format")


def _parse_think(value: Any) -> bool | str | None:
    if value is None or isinstance(value, bool) or value in THINKING_LEVELS:
        return value
    rule = f"should be true, false or one of {', '.join(THINKING_LEVELS)}"
    raise problem("think", f"{rule}; got {describe(value)}")


def _parse_keep_alive(value: Any) -> float | None:
    """Seconds that a model stays loaded after a request. Negative values mean forever."""
    if value is None:
        return None
    seconds: float | None = None
    if isinstance(value, str):
        seconds = _seconds(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    if seconds is None or seconds > MAX_SECONDS:
        rule = 'should be seconds, or a duration such as "5m"'
        raise problem("keep_alive", f"{rule}, got {describe(value)}")
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if re.fullmatch(r"\d{1,12}", digits):
        return sign * float(digits)
    parts = _DURATION.findall(digits)
    if not parts or "".join(map("".join, parts)) != digits:
        return None
    return sign * sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


def _parse_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_INPUTS:
        rule = f"should be a text or a list of at most {MAX_INPUTS} texts"
        raise problem("input", f"{rule}, got {describe(value)}")
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise problem(f"input[{position}]", f"should be a text, got {describe(text)}")
    return tuple(texts)


def _schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*kinds, {"type": "null"}]})


_TEXT, _OBJECT, _BOOLEAN = {"type": "string"}, {"type": "object"}, {"type": "boolean"}
_OBJECTS = {"type": "array", "items": _OBJECT}
KeepAlive = Annotated[
    float | None,
    PlainValidator(_parse_keep_alive),
    _schema(_TEXT, {"type": "number", "minimum": -MAX_SECONDS, "maximum": MAX_SECONDS}),
]
Format = Annotated[GrammarSpec | None, PlainValidator(_parse_format), _schema(_TEXT, _OBJECT)]
Think = Annotated[
    bool | str | None,
    PlainValidator(_parse_think),
    _schema(_BOOLEAN, {"enum": list(THINKING_LEVELS)}),
]
Options = Annotated[dict[str, Any], Field(max_length=64)]
Messages = Annotated[tuple[dict[str, Any], ...], PlainValidator(parse_messages), _schema(_OBJECTS)]
Texts = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_texts),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "maxItems": MAX_INPUTS, "items": _TEXT}]}),
]


def _describe_options(schema: dict[str, Any]) -> None:
    """Add `options` to the JSON schema of a body, which has the options as fields."""
    schema["properties"]["options"] = _OBJECT


class OllamaGenerationBody(SamplingBody):
    """Fields of all requests for text. The answer is streamed unless `stream` is false. If
    `max_tokens` is not positive, only the context limits the answer.
    """

    model_config = ConfigDict(json_schema_extra=_describe_options)

    model: fields.ModelName | None = None
    max_tokens: Annotated[int, Field(ge=-2, le=fields.MAX_TOKENS)] | None = None
    format: Format = None
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    template: Annotated[None, *refused(_OF_PRESET, "")] = None
    n: Annotated[None, *refused("an answer has one choice", 1)] = None
    truncate: bool | None = None
    shift: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _truncates(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return {"truncate_prompt_tokens": -1} | raw if raw.get("truncate") else raw

    @model_validator(mode="after")
    def _can_be_followed(self) -> "OllamaGenerationBody":
        if self.top_logprobs and not self.logprobs:
            raise problem("top_logprobs", "is only allowed when logprobs is true")
        return self

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def params(self, card: ModelCard) -> SamplingParams:
        """Sampling parameters for the backend. Those that neither the request nor the model's
        preset sets have Ollama's defaults.
        """
        changed: dict[str, Any] = self.missing_defaults("ollama", card)
        limit = self.max_tokens
        if limit is not None and limit <= 0:
            limit = fields.NO_LIMIT
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        body = self.model_copy(update=changed)
        params = body.sampling(card, limit, logprobs, "options.num_predict")
        preset = {} if card.preset is None else card.preset.parameters
        if params.has_penalties and body.repeat_last_n is None and "repeat_last_n" not in preset:
            params = msgspec.structs.replace(params, repeat_last_n=DEFAULT_WINDOW)
        is_random = self.seed is not None and self.seed < 0
        return msgspec.structs.replace(params, seed=None) if is_random else params


class OllamaChatBody(OllamaGenerationBody):
    messages: Messages = ()
    tools: fields.Tools = ()


class OllamaGenerateBody(OllamaGenerationBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: Annotated[list[Any], Field(max_length=64)] | None = None
    raw: bool | None = None
    context: Annotated[None, *refused("send the conversation to /api/chat", [])] = None

    @model_validator(mode="after")
    def _prompt_fields_agree(self) -> "OllamaGenerateBody":
        if self.raw or self.suffix:
            for name in ("system", "images"):
                if getattr(self, name):
                    raise problem(name, f"can't be used with {'raw' if self.raw else 'suffix'}")
        return self

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The prompt as a conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user"} | with_images(self.prompt or "", self.images or None, "images")
        return (*system, user)


class OllamaEmbedBody(VectorsBody):
    """Body of `/api/embed`. By default, texts that are too long are cut at their end."""

    input: Texts
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsBody(VectorsBody):
    """Body of `/api/embeddings`, which `/api/embed` replaces."""

    prompt: str = ""
    options: Options | None = None
    keep_alive: KeepAlive = None


class OllamaNamedBody(BaseModel):
    """A model by its name. Older clients send `name`. Ollama's own program sends both, and empty
    texts for what it does not use.
    """

    model_config = _STRICT

    model: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    @property
    def model_name(self) -> str:
        found = self.model or self.name
        if not found:
            raise problem("model", "is needed")
        return found


class OllamaShowBody(OllamaNamedBody):
    verbose: bool | None = None
    system: Annotated[None, *refused("create a model with it", "")] = None
    template: Annotated[None, *refused(_OF_PRESET, "")] = None
    options: Annotated[None, *refused("create a model with them as parameters", {})] = None


class OllamaPullBody(OllamaNamedBody):
    stream: bool | None = None
    insecure: bool | None = None
    username: Annotated[None, *refused("set HF_TOKEN for the server", "")] = None
    password: Annotated[None, *refused("set HF_TOKEN for the server", "")] = None


class OllamaCopyBody(BaseModel):
    model_config = _STRICT

    source: fields.ModelName
    destination: fields.ModelName


class OllamaCreateBody(OllamaNamedBody):
    """Body of `/api/create`: a model that is another model with defaults of its own."""

    base: Annotated[fields.ModelName | None, Field(alias="from")] = None
    system: Annotated[str, Field(max_length=10**6)] | None = None
    parameters: Options | None = None
    license: str | list[str] | None = None
    stream: bool | None = None
    template: Annotated[None, *refused(_OF_PRESET, "")] = None
    messages: Annotated[None, *refused("put them into the requests", [])] = None
    files: Annotated[None, *refused("pull a model, and name it in from", {})] = None
    adapters: Annotated[None, *refused("merge the adapter into the model", {})] = None
    quantize: Annotated[None, *refused("pull a quantized model", "")] = None


# Maps paths to the JSON body of a POST.
BODIES: dict[str, type[BaseModel]] = {
    "/api/chat": OllamaChatBody,
    "/api/copy": OllamaCopyBody,
    "/api/create": OllamaCreateBody,
    "/api/embed": OllamaEmbedBody,
    "/api/embeddings": OllamaEmbeddingsBody,
    "/api/generate": OllamaGenerateBody,
    "/api/pull": OllamaPullBody,
    "/api/show": OllamaShowBody,
}
