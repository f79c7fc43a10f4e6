"""What clients may ask for: every field, its type and its bounds.

Types are strict (`"1"` and `true` are no numbers) and every number has both bounds, written so that
NaN fails them. null is the same as leaving a field out. Names and defaults are those of the OpenAI
API; the sampling fields that it lacks have the names that vLLM gave them.
"""

from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.errors import describe, invalid_request
from engine.servers.openai.messages import parse_messages, problem
from engine.servers.openai.refusals import drop_no_effect

MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1_024
MAX_PROMPTS = 128
MAX_TOKEN_ID = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16

Prompt = str | tuple[int, ...]


def _off_if_negative(value: Any) -> Any:
    """vLLM writes -1 for what others write as 0."""
    return 0 if type(value) is int and value == -1 else value


def _parse_stop(value: Any) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise problem("stop", f"should be a string or a list of strings, got {describe(value)}")
    if len(stops) > MAX_STOPS:
        raise problem("stop", f"should have at most {MAX_STOPS} strings, got {len(stops)}")
    for position, stop in enumerate(stops):
        if not isinstance(stop, str) or len(stop) > MAX_STOP_LENGTH:
            raise problem(
                f"stop[{position}]",
                f"should be a string of at most {MAX_STOP_LENGTH} characters, got {describe(stop)}",
            )
    return tuple(stop for stop in stops if stop)


def _parse_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise problem("logit_bias", f"should be an object, got {describe(value)}")
    if len(value) > MAX_BIASES:
        raise problem("logit_bias", f"should have at most {MAX_BIASES} keys, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise problem("logit_bias", f"keys should be token ids, got {describe(key)}")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise problem(f"logit_bias.{key}", f"should be from -100 to 100, got {describe(bias)}")
        biases[int(key)] = float(bias)
    return biases


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value
    )


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    shape = f"should be text, token ids, or a list of 1 to {MAX_PROMPTS} of either"
    if not isinstance(value, list) or not value:
        raise problem("prompt", f"{shape}; got {describe(value)}")
    if type(value[0]) is int:
        if not _is_token_list(value):
            raise problem("prompt", f"token ids should be integers from 0 to {MAX_TOKEN_ID}")
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise problem("prompt", f"{shape}; got {len(value)}")
    prompts: list[Prompt] = []
    for position, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif item and _is_token_list(item):
            prompts.append(tuple(item))
        else:
            raise problem(
                f"prompt[{position}]", f"should be text or token ids; got {describe(item)}"
            )
    return tuple(prompts)


def _parse_one_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if value and _is_token_list(value):
        return tuple(value)
    raise problem("prompt", f"should be text or a list of token ids; got {describe(value)}")


Fraction = Annotated[float, Field(ge=0, le=1)]
SignedPenalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=2**24)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingBody(BaseModel):
    """What every way of asking for text has in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**24)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0, le=2**24), BeforeValidator(_off_if_negative)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: SignedPenalty | None = None
    frequency_penalty: SignedPenalty | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_parse_bias)] = {}
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stop)] = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None  # lower runs first
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def sampling(
        self, card: ModelCard, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """`max_tokens` None: as many as the context has room for, which the backend knows."""
        if max_tokens is not None and max_tokens > card.max_model_len:
            raise InvalidRequestError(
                f"max_tokens is {max_tokens}. This model's maximum context length is"
                f" {card.max_model_len} tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        min_tokens = self.min_tokens or 0
        if min_tokens > (max_tokens or card.max_model_len):
            raise InvalidRequestError(
                f"min_tokens ({min_tokens}) is more than an answer may have"
                f" ({max_tokens or card.max_model_len}).",
                param="min_tokens",
            )
        # Of nothing but the most likely token, top_p = 0 keeps that one.
        only_best = self.top_p == 0
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=_default(self.temperature, 1.0),
            top_k=1 if only_best else self.top_k or 0,
            top_p=1.0 if only_best else _default(self.top_p, 1.0),
            min_p=self.min_p or 0.0,
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            seed=None if self.seed is None else self.seed % 2**63,
            n=self.num_choices,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None


class OpenAIBody(SamplingBody):
    model: ModelName
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "OpenAIBody":
        if self.stream_options is not None and not self.stream:
            raise problem("stream_options", "is only allowed when stream is true")
        return self


class ChatBody(OpenAIBody):
    messages: Annotated[tuple[dict[str, Any], ...], PlainValidator(parse_messages)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise problem("top_logprobs", "is only allowed when logprobs is true")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise problem("max_completion_tokens", "differs from max_tokens; send one of them")
        return self

    def params(self, card: ModelCard) -> SamplingParams:
        limit = self.max_tokens or self.max_completion_tokens
        return self.sampling(card, limit, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(OpenAIBody):
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_parse_prompts)]
    logprobs: NumLogprobs | None = None

    def params(self, card: ModelCard) -> SamplingParams:
        return self.sampling(card, self.max_tokens or DEFAULT_COMPLETION_TOKENS, self.logprobs)


class GenerateBody(SamplingBody):
    prompt: Annotated[Prompt, PlainValidator(_parse_one_prompt)]
    model: ModelName | None = None
    logprobs: NumLogprobs | None = None

    def params(self, card: ModelCard) -> SamplingParams:
        return self.sampling(card, self.max_tokens or DEFAULT_COMPLETION_TOKENS, self.logprobs)


Body = TypeVar("Body", bound=SamplingBody)


def parse_body(kind: type[Body], raw: dict[str, Any]) -> Body:
    """`raw` as a `kind`. Raises `InvalidRequestError` that names field, rule and what was given."""
    try:
        return kind.model_validate(drop_no_effect(raw, kind.model_fields))
    except ValidationError as error:
        raise invalid_request(error) from None


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
