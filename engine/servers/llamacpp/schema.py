"""Request bodies of llama.cpp's server. Parameters that have a name of this server as well are
converted by the table of dialects, so only the others are defined here.
"""

from typing import Annotated, Any

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from engine.core.interfaces.backend import GrammarSpec, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import check_keys, describe, problem
from engine.servers.openai.embeddings import MAX_INPUTS, VectorsBody
from engine.servers.openai.schema import ChatPromptBody
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody

MAX_PROBS = 1024
MAX_RESPONSE_FIELDS = 128
MAX_EXTRA = 1024

# Texts and token ids that are joined to one prompt.
Parts = tuple[str | int, ...]


def parse_parts(value: Any, where: str) -> Parts:
    """One prompt: text, token ids, both in one list, or an object with the text."""
    if isinstance(value, dict):
        check_keys(value, ("prompt_string", "multimodal_data"), where)
        if value.get("multimodal_data"):
            rule = "is not supported by this endpoint; send images in messages"
            raise problem(f"{where}.multimodal_data", rule)
        value = value.get("prompt_string")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise problem(where, f"should be text, or a list of texts and token ids; {_got(value)}")
    for position, part in enumerate(value):
        is_id = type(part) is int and 0 <= part <= fields.MAX_TOKEN_ID
        if not (is_id or isinstance(part, str)):
            raise problem(f"{where}[{position}]", f"should be text or a token id, {_got(part)}")
    return tuple(value)


def _got(value: Any) -> str:
    return f"got {describe(value)}"


def parse_prompts(
    value: Any, where: str = "prompt", most: int = fields.MAX_PROMPTS
) -> tuple[Parts, ...]:
    """One or several prompts. A list with a token id is one prompt; a list of texts is several."""
    if not isinstance(value, list) or any(type(part) is int for part in value):
        return (parse_parts(value, where),)
    if not 1 <= len(value) <= most:
        raise problem(where, f"should be one prompt, or a list of 1 to {most}; {_got(value)}")
    return tuple(parse_parts(item, f"{where}[{index}]") for index, item in enumerate(value))


_ID = {"type": "integer", "minimum": 0, "maximum": fields.MAX_TOKEN_ID}
_ONE_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _ID]}},
        {
            "type": "object",
            "required": ["prompt_string"],
            "properties": {"prompt_string": {"type": "string"}},
        },
    ]
}
_PROMPTS_SCHEMA = {
    "anyOf": [
        _ONE_PROMPT,
        {"type": "array", "minItems": 1, "maxItems": fields.MAX_PROMPTS, "items": _ONE_PROMPT},
    ]
}
Prompts = Annotated[
    tuple[Parts, ...], PlainValidator(parse_prompts), WithJsonSchema(_PROMPTS_SCHEMA)
]


def _parse_bias(value: Any) -> dict[int | str, float]:
    """Biases in one of the forms of `fields.parse_bias`. Here, the keys of an object may be texts
    as well.
    """
    if isinstance(value, dict):
        value = [[int(k[:11]) if k.isdecimal() else k, bias] for k, bias in value.items()]
    return fields.parse_bias(value)


_BIAS_SCHEMA = {
    "anyOf": [
        {"type": "array", "maxItems": fields.MAX_BIASES, "items": {"type": "array"}},
        {"type": "object", "maxProperties": fields.MAX_BIASES},
        {"type": "null"},
    ]
}


class NativeSampling(SamplingBody):
    """Body of `/completion`, without the prompt."""

    model: fields.ModelName | None = None
    # -1 means that only the context limits the answer. 0 computes the prompt alone.
    n_predict: Annotated[int, Field(ge=-1, le=fields.MAX_TOKENS)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_PROBS)] | None = None
    seed: Annotated[int, Field(ge=-1, le=2**64 - 1)] | None = None  # -1: a random seed
    # The keys are token ids and texts.
    logit_bias: Annotated[
        dict[Any, float], PlainValidator(_parse_bias), WithJsonSchema(_BIAS_SCHEMA)
    ] = {}
    structured_outputs: fields.StructuredOutputs = None
    # A router sends requests with the same slot to the same backend. -1: no slot
    id_slot: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    response_fields: (
        Annotated[
            list[Annotated[str, Field(max_length=256)]], Field(max_length=MAX_RESPONSE_FIELDS)
        ]
        | None
    ) = None

    @property
    def conversation_key(self) -> str | None:
        return self.end_user if self.id_slot in (None, -1) else f"slot {self.id_slot}"

    @property
    def grammar(self) -> GrammarSpec | None:
        return self.structured_outputs

    @property
    def reports_progress(self) -> bool:
        return bool(self.stream and (self.return_progress or self.timings_per_token))

    @property
    def writes_nothing(self) -> bool:
        return self.n_predict == 0

    def limit(self, card: ModelCard) -> int | None:
        """The max number of tokens that the client asked for. None if there is no limit."""
        asked = self.max_tokens if self.n_predict is None else self.n_predict
        preset = {} if card.preset is None else card.preset.parameters
        asked = preset.get("max_tokens") if asked is None else asked
        return None if asked is None or asked < 0 else asked

    def params(self, card: ModelCard, room: int | None, bias: dict[int, float]) -> SamplingParams:
        """Sampling parameters for the backend. `room` is the number of tokens that fit behind the
        longest prompt, if it is known. A longer answer ends there, as in llama.cpp. `bias` has the
        biases by token id.
        """
        missing: dict[str, Any] = self.missing_defaults("llamacpp", card)
        missing["logit_bias"] = bias
        limit = 1 if self.writes_nothing else self.limit(card)
        if limit is None:
            limit = fields.NO_LIMIT
        elif room is not None:
            limit = min(limit, max(room, 1))
        body = self.model_copy(update=missing)
        params = body.sampling(card, limit, self.n_probs or None)
        return msgspec.structs.replace(params, seed=None) if self.seed == -1 else params


class NativeBody(NativeSampling):
    prompt: Prompts


class Extra(BaseModel):
    """A file that is put before the text to fill in."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    filename: Annotated[str, Field(max_length=4096)]
    text: str


class InfillBody(NativeSampling):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Extra], Field(max_length=MAX_EXTRA)] | None = None
    prompt: str | None = None  # the beginning of the text to fill in


class TemplateBody(ChatPromptBody):
    """A conversation whose prompt is rendered or counted, and not answered."""

    messages: fields.Messages


def _parse_inputs(name: str) -> PlainValidator:
    return PlainValidator(lambda value: parse_prompts(value, name, MAX_INPUTS))


class EmbeddingsBody(VectorsBody):
    """Body of `/embedding` and `/embeddings`. The inputs have either name."""

    content: (
        Annotated[tuple[Parts, ...], _parse_inputs("content"), WithJsonSchema(_PROMPTS_SCHEMA)]
        | None
    ) = None
    input: (
        Annotated[tuple[Parts, ...], _parse_inputs("input"), WithJsonSchema(_PROMPTS_SCHEMA)] | None
    ) = None
    # 2 is the Euclidean norm. Vectors always have unit length in it.
    embd_normalize: Annotated[int, Field(ge=2, le=2)] | None = None

    @property
    def inputs(self) -> tuple[Parts, ...]:
        return self.content or self.input or ()

    @model_validator(mode="after")
    def _one_name(self) -> "EmbeddingsBody":
        if (self.content is None) == (self.input is None):
            raise problem("content", "send the inputs as content or as input")
        return self
