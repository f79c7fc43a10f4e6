"""Sampling fields that all APIs share, and validation of JSON bodies.

Types are strict: `"1"` and `true` are not numbers. Every number has a minimum and a maximum, and
NaN is refused. null means the same as a missing field. Parameters of other servers are converted,
or cause a warning, or are refused with an error that names them; see `dialects`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.core.interfaces.sampling_fields import Count, SamplingFields
from engine.servers.http.errors import describe, invalid_request
from engine.servers.schema import fields
from engine.servers.schema.dialects.parameters import DEFAULTS
from engine.servers.schema.dialects.reading import Reading, asks_for_nothing, read_words

MAX_N = 16


@dataclass(frozen=True, slots=True)
class OffValues:
    """Marks a field of a body that is not supported. The body defines the field only to refuse it
    with a special message. The `values` have no effect and are accepted.
    """

    values: tuple[Any, ...]


def refused(instead: str, *no_effect: Any) -> tuple[PlainValidator, WithJsonSchema, OffValues]:
    """Pydantic annotations for a parameter that is refused unless it is null or in `no_effect`.
    `instead` says in the error what the client should do.
    """

    def check(value: Any, info: ValidationInfo) -> None:
        if asks_for_nothing(value, no_effect):
            return
        raise InvalidRequestError(
            f"{info.field_name}: {describe(value)} is not supported by this server; {instead}.",
            param=info.field_name,
            code="unsupported_parameter",
        )

    schema = WithJsonSchema({"enum": [None, *no_effect]})
    return PlainValidator(check), schema, OffValues(no_effect)


def off_values(kind: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """The unsupported fields of the body `kind`, each with the values that are accepted besides
    null because they have no effect.
    """
    return {
        name: each.values
        for name, field in kind.model_fields.items()
        for each in field.metadata
        if isinstance(each, OffValues)
    }


def _or_no_limit(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, fields.NoLimit) else validate(value)


TokenLimit = Annotated[fields.TokenCount, WrapValidator(_or_no_limit)]
TokenLimitOrZero = Annotated[int, Field(ge=0, le=fields.MAX_TOKENS), WrapValidator(_or_no_limit)]


class SamplingBody(SamplingFields):
    """Fields that all requests for text generation have."""

    model_config = ConfigDict(strict=True)

    max_tokens: TokenLimit | None = None
    min_tokens: Count | None = None
    top_k: fields.TopK | None = None
    logit_bias: fields.LogitBias = {}
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: fields.StopStrings = None
    stop_token_ids: (
        Annotated[list[fields.TokenId], Field(max_length=fields.MAX_STOP_IDS)] | None
    ) = None
    ignore_eos: bool | None = None
    allowed_token_ids: fields.AllowedIds | None = None
    bad_words: fields.BadWords | None = None
    stop_regex: fields.StopRegexes | None = None
    dry_sequence_breakers: fields.Breakers | None = None
    samplers: fields.Samplers = ()
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    priority: fields.Priority | None = None
    user: fields.EndUser | None = None
    metadata: fields.Metadata = {}
    # Requests share cached prefixes only if they come from the same tenant and have the same salt.
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # If false, the prompt is computed without cached prefixes.
    cache_prompt: bool | None = None
    truncate_prompt_tokens: fields.Truncation = None
    truncation_side: Literal["left", "right"] | None = None  # the side that is cut off

    @property
    def end_user(self) -> str | None:
        return self.user

    @property
    def conversation_key(self) -> str | None:
        """A string that the client sends with all requests of one conversation, if it sends one."""
        return self.end_user

    @property
    def expected_text(self) -> str:
        """The answer that the client expects, if it says so."""
        return ""

    @property
    def reports_progress(self) -> bool:
        """Whether the stream of the answer needs to know how much of the prompt is computed."""
        return False

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def sampling(
        self,
        card: ModelCard,
        max_tokens: int | None,
        logprobs: int | None,
        limit_name: str = "max_tokens",
        default_limit: int | None = None,
    ) -> SamplingParams:
        """The sampling parameters for the backend. If `max_tokens` is None, the model's preset
        limits the answer, or else `default_limit`, or else only the context length. With
        `fields.NO_LIMIT`, only the context does. `limit_name` is the client's name for
        `max_tokens`; errors use it.
        """
        body = self
        if card.preset is not None:
            body = self._with_defaults(card.preset.parameters)
            max_tokens = max_tokens or card.preset.parameters.get("max_tokens")
        max_tokens = max_tokens or default_limit
        if isinstance(max_tokens, fields.NoLimit):
            max_tokens = None
        if max_tokens is not None and max_tokens > card.max_model_len:
            raise InvalidRequestError(
                f"{limit_name} is {max_tokens}. This model's maximum context length is"
                f" {card.max_model_len} tokens.",
                param=limit_name,
                code="context_length_exceeded",
            )
        if (body.min_tokens or 0) > (max_tokens or card.max_model_len):
            raise InvalidRequestError(
                f"min_tokens ({body.min_tokens}) is more than an answer may have"
                f" ({max_tokens or card.max_model_len}).",
                param="min_tokens",
            )
        biases = body.logit_bias.items()
        changed: dict[str, Any] = {
            "max_tokens": max_tokens,
            "logit_bias": {key: bias for key, bias in biases if isinstance(key, int)},
            "text_bias": {key: bias for key, bias in biases if isinstance(key, str)},
            "n": body.num_choices,
            "logprobs": logprobs,
        }
        if body.seed is not None:
            changed["seed"] = body.seed % 2**63
        if body.top_p == 0 and not body.samplers:  # keeps only the likeliest token
            changed |= {"top_k": 1, "top_p": 1.0}
        params = SamplingParams(**body._set_of(_PARAMETERS) | changed)
        return params.named_samplers_only() if params.samplers else params

    def missing_defaults(self, dialect: str, card: ModelCard) -> dict[str, float]:
        """What the own API of another server uses for parameters that neither the request nor the
        model's preset sets, and that the backend has.
        """
        preset = {} if card.preset is None else card.preset.parameters
        kept = {*preset, *card.lacks, *card.emulated}
        return {
            name: value
            for name, value in DEFAULTS[dialect].items()
            if getattr(self, name) is None and name not in kept
        }

    def _set_of(self, names: Iterable[str]) -> dict[str, Any]:
        """The fields of these names that are not null. Lists become tuples."""
        values = ((name, getattr(self, name)) for name in names)
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values
            if value is not None
        }

    def _with_defaults(self, defaults: Mapping[str, Any]) -> "SamplingBody":
        """Fill in defaults of parameters that the client did not send, or sent as null."""
        missing = {
            name: value
            for name, value in defaults.items()
            if name != "max_tokens" and getattr(self, name) is None
        }
        return self.model_copy(update=missing)


# The fields of a body that are parameters of the engine. The others have their own code.
_PARAMETERS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in SamplingBody.model_fields
)
Body = TypeVar("Body", bound=BaseModel)


def parse_body(
    kind: type[Body],
    raw: dict[str, Any],
    on_read: Callable[[Reading], None] | None = None,
    *,
    ignores: bool = False,
) -> Body:
    """Validate the body `raw` of a request for an answer. Parameters of other servers are converted
    first. `on_read` gets those that were converted, and those that have no effect. It is not called
    if there are none. If `ignores`, unknown and unsupported parameters have no effect.
    """
    known = _names(kind)
    if raw.keys() <= known:
        return validated(kind, raw)
    reading = read_words(raw, known, warns=issubclass(kind, SamplingBody), ignores=ignores)
    body = validated(kind, reading.values, reading.sent_as)
    if on_read is not None:
        on_read(reading)
    return body


@functools.cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """The parameters of a body under the names that clients use."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def validated(
    kind: type[Body], raw: dict[str, Any], sent_as: Mapping[str, str] | None = None
) -> Body:
    """Validate the JSON object `raw` as a body of class `kind`. If it is invalid, raises an
    `InvalidRequestError` that names the field, the rule and the given value. `sent_as` maps fields
    to the names that the client used.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise invalid_request(error, sent_as or {}) from None
