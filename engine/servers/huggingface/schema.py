"""Bodies of Text Generation Inference and Text Embeddings Inference. The sampling parameters in
`parameters` are fields of the body; the table of dialects moves them there.
"""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.core.interfaces.backend import GrammarSpec, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import check_keys, describe, problem
from engine.servers.openai.embeddings import MAX_DIMENSIONS, VectorsBody, inputs_named
from engine.servers.openai.schema import NumLogprobs
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody
from engine.servers.schema.structured import parse_constraint

DEFAULT_TOKENS = 100  # Text Generation Inference's default of max_new_tokens
# With one of these, it samples; otherwise it takes the likeliest tokens.
_SAMPLERS = ("temperature", "top_k", "top_p", "typical_p")


def _parse_grammar(value: Any) -> GrammarSpec | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("json", "regex"):
        raise problem("grammar.type", f"should be json or regex, got {describe(kind)}")
    check_keys(value, ("type", "value"), "grammar")
    parsed = parse_constraint(kind, value.get("value"), "grammar.value")
    return None if parsed is None else msgspec.structs.replace(parsed, param="grammar")


def _describe_parameters(schema: dict[str, Any]) -> None:
    """Add `parameters` to the JSON schema of the body, which has them as fields."""
    schema["properties"]["parameters"] = {"type": "object"}


class TextGenerationBody(SamplingBody):
    model_config = ConfigDict(json_schema_extra=_describe_parameters)

    inputs: str
    model: fields.ModelName | None = None
    do_sample: bool | None = None
    details: bool | None = None  # whether the answer has its tokens with their logprobs
    decoder_input_details: bool | None = None  # the same for the prompt
    top_n_tokens: NumLogprobs | None = None
    return_full_text: bool | None = None
    truncate: Annotated[int, Field(ge=1, le=fields.MAX_TOKENS)] | None = None  # tokens of inputs
    grammar: Annotated[
        GrammarSpec | None,
        PlainValidator(_parse_grammar),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
    ] = None
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "TextGenerationBody":
        if self.num_choices != 1:
            raise problem("n", "should be 1, because an answer has one text")
        if self.decoder_input_details and not self.details:
            raise problem("decoder_input_details", "is only allowed when details is true")
        if self.decoder_input_details and self.stream:
            raise problem("decoder_input_details", "can't be streamed")
        return self

    def params(self, card: ModelCard) -> SamplingParams:
        samples = self.do_sample or any(getattr(self, name) is not None for name in _SAMPLERS)
        defaults = {} if samples else self.missing_defaults("huggingface", card)
        params = self.model_copy(update=defaults).sampling(
            *(card, self.max_tokens, self.top_n_tokens or 0, "max_new_tokens"),
            default_limit=DEFAULT_TOKENS,
        )
        return msgspec.structs.replace(params, score_prompt=bool(self.decoder_input_details))


class EmbedBody(VectorsBody):
    """The body of `/embed`. Texts that are too long are refused unless `truncate`."""

    inputs: Annotated[tuple[fields.Prompt, ...], *inputs_named("inputs")]
    normalize: bool = True
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    prompt_name: Annotated[str, Field(max_length=256)] | None = None


# Maps paths to the JSON body of a POST.
BODIES: dict[str, type[BaseModel]] = {
    "/": TextGenerationBody,
    "/embed": EmbedBody,
    "/generate_stream": TextGenerationBody,
}
