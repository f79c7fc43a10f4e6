"""Request bodies of `/v1/responses`: OpenAI's fields, and the sampling fields that all endpoints
share.

OpenAI's prompt templates are not supported. Their parameter is refused with an error that names it.
Tools that are not functions are left out, with a warning.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from engine.core.interfaces.backend import GrammarSpec, ModelCard, ToolChoice
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import check_keys, problem, short_text
from engine.servers.http.listing import Cursor, Order, Query
from engine.servers.openai.schema import NumLogprobs, ReasoningEffort
from engine.servers.responses.items import MAX_ID, MAX_ITEMS, parse_input
from engine.servers.responses.tools import (
    NO_TOOLS,
    PLAIN_TEXT,
    OfferedTools,
    TextFormat,
    Tools,
    parse_flat_choice,
    parse_flat_tools,
    parse_format,
)
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody, refused

MAX_INCLUDES = 32
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Values of `include`. All but the first two concern OpenAI's built-in tools and images, which this
# server lacks. They have no effect.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


# Values of `include` when a stored response is read. Logprobs are always included, so they are
# accepted. A single value in a query arrives as a string.
AlwaysThere = Annotated[
    list[Literal["message.output_text.logprobs"]],
    Field(max_length=MAX_INCLUDES),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
ImplicitCache = Annotated[None, *refused("leave it out", {"mode": "implicit"})]
InMemory = Annotated[None, *refused("leave it out", "in_memory", "in-memory")]
DefaultTier = Annotated[None, *refused("leave it out", "auto", "default")]
ShortText = Annotated[str, Field(max_length=512)]
ResponseId = Annotated[str, Field(min_length=1, max_length=128)]
InputItems = Annotated[
    tuple[dict[str, Any], ...],
    PlainValidator(parse_input),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_ITEMS,
                    "items": {"type": "object"},
                },
            ]
        }
    ),
]


def _parse_conversation(value: Any) -> str:
    """The id of a conversation, which is sent as text or in an object."""
    if isinstance(value, dict):
        check_keys(value, ("id",), "conversation")
        value = value.get("id")
    return short_text(value, "conversation", MAX_ID)


ConversationId = Annotated[
    str,
    PlainValidator(_parse_conversation),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
FlatTools = Annotated[
    OfferedTools,
    PlainValidator(parse_flat_tools),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
Format = Annotated[TextFormat, PlainValidator(parse_format), WithJsonSchema({"type": "object"})]


class TextConfig(BaseModel):
    model_config = _STRICT

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(BaseModel):
    model_config = _STRICT

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(BaseModel):
    model_config = _STRICT

    include_obfuscation: Literal[False] | None = None  # padding of events is not supported


class ResponseQuery(Query):
    include: AlwaysThere | None = None
    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    include_obfuscation: Annotated[None, *refused("leave it out", "false")] = None

    @model_validator(mode="after")
    def _only_a_stream_has_a_start(self) -> "ResponseQuery":
        if self.starting_after is not None and not self.stream:
            raise problem("starting_after", "is only allowed when stream is true")
        return self


class ItemsQuery(Query):
    after: Cursor | None = None
    include: AlwaysThere | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Order = "desc"


class HistoryBody(BaseModel):
    """Fields of `/v1/responses` that name the conversation."""

    model_config = _STRICT

    input: InputItems
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    conversation: ConversationId | None = None

    @model_validator(mode="after")
    def _one_history(self) -> "HistoryBody":
        if self.conversation is not None and self.previous_response_id is not None:
            raise problem("conversation", "excludes previous_response_id")
        return self


class CompactBody(HistoryBody):
    """Body of `/v1/responses/compact`."""

    model: fields.ModelName | None = None
    input: InputItems = Field(default_factory=tuple)
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: ImplicitCache = None
    prompt_cache_retention: InMemory = None
    service_tier: DefaultTier = None


class PromptBody(HistoryBody):
    """Fields of `/v1/responses` that determine the prompt."""

    tools: FlatTools | None = None
    tool_choice: fields.RawToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[None, *refused("send items that fit the context", "disabled")] = None

    @property
    def offered(self) -> OfferedTools:
        return self.tools or NO_TOOLS

    @property
    def text_format(self) -> TextFormat:
        return (self.text.format if self.text is not None else None) or PLAIN_TEXT

    @property
    def grammar(self) -> GrammarSpec | None:
        return self.text_format.parsed.grammar

    @property
    def choice_of_tools(self) -> tuple[ToolChoice, Tools]:
        return parse_flat_choice(self.tool_choice, self.offered.functions)

    @model_validator(mode="after")
    def _choice_fits_tools(self) -> "PromptBody":
        _ = self.choice_of_tools  # raises if it is invalid
        return self


class TokenCountBody(PromptBody):
    """Body of `/v1/responses/input_tokens`."""

    model: fields.ModelName | None = None
    personality: Annotated[None, *refused("write it in instructions")] = None


class OutputLimit(BaseModel):
    """The length limit. It is in a base class of its own, so that its errors are reported before
    those of other fields, as for `max_tokens`.
    """

    model_config = _STRICT

    max_output_tokens: fields.TokenCount | None = None


class ResponseBody(PromptBody, SamplingBody, OutputLimit):
    model: fields.ModelName | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[Includable], Field(max_length=MAX_INCLUDES)] | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    safety_identifier: fields.EndUser | None = None
    prompt_cache_key: ShortText | None = None
    # Labels by which Codex tells its sessions apart, like `metadata` but without its limits.
    client_metadata: dict[str, Any] | None = None
    # This limits calls of OpenAI's built-in tools. It has no effect, because this server has none.
    max_tool_calls: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tokens: Annotated[None, *refused("send max_output_tokens")] = None
    n: Annotated[None, *refused("a response has one answer", 1)] = None
    background: bool | None = None
    prompt: Annotated[None, *refused("send instructions and input")] = None
    context_management: Annotated[None, *refused("send items that fit the context", [])] = None
    moderation: Annotated[None, *refused("leave it out")] = None
    prompt_cache_options: ImplicitCache = None
    prompt_cache_retention: InMemory = None
    service_tier: DefaultTier = None

    @property
    def end_user(self) -> str | None:
        return self.safety_identifier or self.user

    @property
    def conversation_key(self) -> str | None:
        return self.prompt_cache_key or self.end_user

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @model_validator(mode="after")
    def _background_needs_the_store(self) -> "ResponseBody":
        if self.background and self.store is False:
            raise problem("background", "needs the stored response; leave out store")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "ResponseBody":
        if self.stream_options is not None and not self.stream:
            raise problem("stream_options", "is only allowed when stream is true")
        return self

    def params(self, card: ModelCard) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.with_logprobs else None
        return self.sampling(card, self.max_output_tokens, logprobs, "max_output_tokens")
