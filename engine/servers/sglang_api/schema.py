"""The body of SGLang's /generate. The parameters in `sampling_params` are fields of the body. The
table of dialects converts them to parameters of this server.
"""

from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.core.interfaces.backend import ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import describe, problem
from engine.servers.openai.schema import NumLogprobs
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody

DEFAULT_TOKENS = 128  # SGLang's default of max_new_tokens


def _parse_texts(value: Any) -> str | tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= fields.MAX_PROMPTS:
        rule = f"should be a text or a list of 1 to {fields.MAX_PROMPTS} texts"
        raise problem("text", f"{rule}, got {describe(value)}")
    for position, text in enumerate(value):
        if not isinstance(text, str):
            raise problem(f"text[{position}]", f"should be a text, got {describe(text)}")
    return tuple(value)


def _parse_ids(value: Any) -> tuple[fields.Prompt, ...] | None:
    if value is None:
        return None
    prompts = fields.parse_prompts(value, "input_ids")
    if any(isinstance(prompt, str) for prompt in prompts):
        rule = "should be a list of token ids, or a list of such lists"
        raise problem("input_ids", f"{rule}, got {describe(value)}")
    return prompts


def _describe_params(schema: dict[str, Any]) -> None:
    """Add `sampling_params` to the JSON schema of the body, which has them as fields."""
    schema["properties"]["sampling_params"] = {"type": "object"}


_TEXT = {"type": "string"}
_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": fields.MAX_TOKEN_ID},
}
Texts = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(_parse_texts),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}),
]
Ids = Annotated[
    tuple[fields.Prompt, ...] | None,
    PlainValidator(_parse_ids),
    WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS}, {"type": "null"}]}),
]


class SglangGenerateBody(SamplingBody):
    """The prompt is `text` or `input_ids`. Several prompts, or several answers, make a list of
    answers.
    """

    model_config = ConfigDict(json_schema_extra=_describe_params)

    text: Texts = None
    input_ids: Ids = None
    model: fields.ModelName | None = None
    return_logprob: bool | None = None
    top_logprobs_num: NumLogprobs | None = None
    # Logprobs of the prompt are returned from this position on. -1: none of them.
    logprob_start_len: Annotated[int, Field(ge=-1, le=fields.MAX_TOKENS)] | None = None
    return_text_in_logprobs: bool | None = None
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    parse_special: bool | None = None
    structured_outputs: fields.StructuredOutputs = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "SglangGenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise problem("text", "send either text or input_ids")
        return self

    @property
    def prompts(self) -> tuple[fields.Prompt, ...]:
        if self.input_ids is not None:
            return self.input_ids
        return (self.text,) if isinstance(self.text, str) else self.text or ()

    @property
    def is_single(self) -> bool:
        """Whether the answer is one object, and not a list of them."""
        is_one = isinstance(self.text, str) or (self.text is None and len(self.prompts) == 1)
        return is_one and self.num_choices == 1

    @property
    def scores_prompt(self) -> bool:
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    def params(self, card: ModelCard) -> SamplingParams:
        logprobs = (self.top_logprobs_num or 0) if self.return_logprob else None
        params = self.sampling(
            card, self.max_tokens, logprobs, "max_new_tokens", default_limit=DEFAULT_TOKENS
        )
        return msgspec.structs.replace(params, score_prompt=self.scores_prompt)
