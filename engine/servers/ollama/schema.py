"""Ollama's request bodies. `options` are converted to our sampling parameters, which are fields of
the body, so that they have the same bounds as in all other APIs.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.core.interfaces.backend import GrammarSpec, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import describe, problem
from engine.servers.ollama.messages import parse_messages, with_images
from engine.servers.ollama.options import DEFAULTS, MAX_SECONDS, parse_keep_alive, sampling_of
from engine.servers.openai.embeddings import MAX_DIMENSIONS, MAX_INPUTS, VectorsBody
from engine.servers.openai.schema import NumLogprobs
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody, refused
from engine.servers.schema.structured import schema_spec

THINKING_LEVELS = ("low", "medium", "high", "max")
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
    PlainValidator(parse_keep_alive),
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


class OllamaGenerationBody(SamplingBody):
    """Fields of all requests for text. The answer is streamed unless `stream` is false."""

    model: fields.ModelName | None = None
    options: Options | None = None
    format: Format = None
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    template: Annotated[None, *refused("set it in [presets.ID] of the configuration file", "")] = (
        None
    )
    truncate: bool | None = None
    shift: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _unpack_options(cls, raw: dict[str, Any]) -> dict[str, Any]:
        given = sampling_of(raw.get("options"), cls.model_fields)
        if raw.get("truncate"):
            given.setdefault("truncate_prompt_tokens", -1)
        return raw | given

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
        preset = {} if card.preset is None else card.preset.parameters
        missing = {
            name: value
            for name, value in DEFAULTS.items()
            if getattr(self, name) is None and name not in preset
        }
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        body = self.model_copy(update=missing)
        return body.sampling(card, self.max_tokens, logprobs, "options.num_predict")


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
    """A model by its name. Older clients send `name`."""

    model_config = _STRICT

    model: fields.ModelName | None = None
    name: fields.ModelName | None = None

    @property
    def model_name(self) -> str:
        found = self.model or self.name
        if found is None:
            raise problem("model", "is needed")
        return found


class OllamaShowBody(OllamaNamedBody):
    verbose: bool | None = None


class OllamaPullBody(OllamaNamedBody):
    stream: bool | None = None
    insecure: Literal[False] | None = None  # connections are always verified


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
    template: Annotated[None, *refused("set it in [presets.ID] of the configuration file", "")] = (
        None
    )
    messages: Annotated[None, *refused("put them into the requests", [])] = None
    files: Annotated[None, *refused("pull a model, and name it in from", {})] = None
    adapters: Annotated[None, *refused("merge the adapter into the model", {})] = None
    quantize: Annotated[None, *refused("pull a quantized model", "")] = None
