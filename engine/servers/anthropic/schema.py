"""Request bodies of `/v1/messages` and `/v1/messages/count_tokens`, with the bounds of all fields,
and their conversion to the server's own types.

Types are strict. null means the same as a missing field. Messages, system prompt and tools are
parsed by the `BlockReader` that is pydantic's validation context (see `blocks.py`).
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from starlette.requests import Request

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    GrammarSpec,
    ModelCard,
    ToolChoice,
)
from engine.servers.anthropic.blocks import BlockReader, with_system
from engine.servers.http.errors import invalid_request, problem
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody
from engine.servers.schema.dialects.parameters import Parameter
from engine.servers.schema.dialects.reading import read_words
from engine.servers.schema.messages import MAX_MESSAGES
from engine.servers.schema.structured import schema_spec
from engine.servers.schema.tools import MAX_TOOLS, known_name
from engine.servers.serving.generation import ChatInput, effort_options, thinking_switch
from engine.servers.serving.services import Services

# The value of `context_management` by which Claude Code asks to keep all thinking. The server
# always does this.
KEEP_ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# Maps unsupported parameters to values that are accepted, besides null, because they have no
# effect.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "compaction": (),
    "container": (),
    "context_management": ({}, {"edits": []}, KEEP_ALL_THINKING),
    "diagnostics": ({}, {"previous_message_id": None}),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "thread": (),
    "user_profile_id": (),
}
_UNSUPPORTED = {
    name: Parameter(name=name, dialects=("anthropic",), note="", off=off)
    for name, off in NO_EFFECT.items()
}


def _reader(info: ValidationInfo) -> BlockReader:
    assert isinstance(info.context, BlockReader)
    return info.context


Messages = Annotated[
    list[dict[str, Any]],
    PlainValidator(lambda value, info: _reader(info).messages(value)),
    WithJsonSchema(
        {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"type": "object"}}
    ),
]
Tools = Annotated[
    tuple[dict[str, Any], ...],
    PlainValidator(lambda value, info: _reader(info).tools(value)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "maxItems": MAX_TOOLS, "items": {"type": "object"}},
                {"type": "null"},
            ]
        }
    ),
]

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class Metadata(BaseModel):
    model_config = _STRICT

    user_id: fields.EndUser | None = None


class Thinking(BaseModel):
    model_config = _STRICT

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024, le=2**24)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _only_enabled_has_a_budget(self) -> "Thinking":
        if self.type == "enabled" and self.budget_tokens is None:
            raise problem("thinking.budget_tokens", "is needed when thinking is enabled")
        if self.type != "enabled" and self.budget_tokens is not None:
            raise problem("thinking.budget_tokens", f"has no meaning when thinking is {self.type}")
        return self


class JsonFormat(BaseModel):
    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: Any = Field(alias="schema")  # the field `schema` in JSON


class OutputConfig(BaseModel):
    model_config = _STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ToolChoiceBody(BaseModel):
    model_config = _STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    disable_parallel_tool_use: bool | None = None


class PromptBody(BaseModel):
    """Fields that determine the prompt. They are the whole body of `count_tokens`."""

    model_config = _STRICT

    model: fields.ModelName | None = None
    messages: Messages
    system: str | list[Any] | None = None
    tools: Tools = ()
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of output_config.format
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "PromptBody":
        if self.output_format and self.output_config and self.output_config.format:
            raise problem("output_format", "is the older name of output_config.format; send one")
        return self

    @property
    def json_format(self) -> tuple[str, JsonFormat] | None:
        """The required output format, with the name of the field that the client used. None without
        one.
        """
        if self.output_config is not None and self.output_config.format is not None:
            return "output_config.format", self.output_config.format
        return None if self.output_format is None else ("output_format", self.output_format)


class MessagesBody(PromptBody):
    max_tokens: fields.TokenCount
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=fields.MAX_STOP_LENGTH)]],
            Field(max_length=fields.MAX_STOPS),
        ]
        | None
    ) = None
    temperature: fields.Fraction | None = None
    top_p: fields.Fraction | None = None
    top_k: Annotated[int, Field(ge=0, le=2**24)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    # This field has no effect, because the server has only one service tier.
    service_tier: Literal["auto", "standard_only"] | None = None


Kind = TypeVar("Kind", bound=PromptBody)


@dataclass(frozen=True)
class AnthropicPrompt:
    """The parts of a body that determine the prompt, parsed. They don't depend on the model."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    continues_answer: bool  # whether the last message is the start of the answer
    grammar: GrammarSpec | None
    warnings: dict[str, str]

    def ask(self, card: ModelCard, options: dict[str, Any]) -> ChatInput:
        return ChatInput(
            card,
            self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            grammar=self.grammar,
            template_options=options,
            add_generation_prompt=not self.continues_answer,
            continue_final_message=self.continues_answer,
        )


def parse(kind: type[Kind], raw: dict[str, Any]) -> tuple[Kind, AnthropicPrompt]:
    """Validate a body. Returns the body and its parsed prompt. If the body is invalid, raises an
    `InvalidRequestError` that names the field, the rule and the given value.
    """
    if raw.get("thread") is not None:
        # Anthropic's SDK reads `details`, and then sends the whole conversation instead.
        raise InvalidRequestError(
            "thread is not supported by this server; send the whole conversation in messages.",
            param="thread",
            code="unsupported_parameter",
            details={"error_code": "thread_unsupported_request"},
        )
    reader = BlockReader()
    try:
        body = kind.model_validate(
            read_words(raw, kind.model_fields, _UNSUPPORTED).values, context=reader
        )
    except ValidationError as error:
        raise invalid_request(error) from None
    reader.cache_control(body.cache_control, "cache_control")
    tools = body.tools
    messages = with_system(body.messages, reader.system(body.system or ""))
    prompt = AnthropicPrompt(
        messages=_without_empty_start(messages),
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=not (
            body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        ),
        continues_answer=_continues(messages),
        grammar=_grammar(body),
        warnings=reader.warnings,
    )
    return body, prompt


def sampling_body(body: MessagesBody) -> SamplingBody:
    """Convert the sampling parameters to the body class that all APIs share, with its field
    names.
    """
    given = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "user": body.metadata.user_id if body.metadata is not None else None,
    }
    return SamplingBody.model_validate(given)


def template_options(
    services: Services, request: Request, body: PromptBody, card: ModelCard
) -> dict[str, Any]:
    """Chat template options for `thinking` and `effort`. Warns the client about what the model's
    template does not support.
    """
    options: dict[str, Any] = {}
    wants_thinking = body.thinking is not None and body.thinking.type != "disabled"
    switch = thinking_switch(card, wants_thinking)
    if switch:
        options |= switch
    elif wants_thinking and "reasoning" not in card.capabilities:
        services.warn(request, "thinking", "this model does not think before it answers")
    elif body.thinking is not None and not wants_thinking and "reasoning" in card.capabilities:
        services.warn(request, "thinking", "this model can't be kept from thinking")
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        what = "only max_tokens is enforced, for thinking and answer"
        services.warn(request, "thinking.budget_tokens", what)
    effort = body.output_config.effort if body.output_config is not None else None
    # For models without effort levels, "high" has no effect and needs no warning.
    if effort == "high" and "reasoning_effort" not in card.template_options:
        return options
    return effort_options(services, request, card, effort, "output_config.effort") | options


def _tool_choice(value: ToolChoiceBody | None, tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    if value is None or value.type in ("auto", "none"):
        if value is not None and value.name is not None:
            raise problem("tool_choice.name", f"has no meaning with type {value.type}")
        return ToolChoice("auto" if tools and (value is None or value.type == "auto") else "none")
    if not tools:
        raise problem("tool_choice", f"{value.type} needs tools to choose from")
    if value.type == "any":
        if value.name is not None:
            raise problem("tool_choice.name", "has no meaning with type any")
        return ToolChoice("required")
    return ToolChoice("named", known_name(value.name, tools, "tool_choice.name"))


def _continues(messages: list[dict[str, Any]]) -> bool:
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise problem("messages", "should go on with the tool_result of the last tool_use")
    return bool(last["content"])


def _without_empty_start(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Drop an empty assistant message at the end, because it has no text to continue."""
    last = messages[-1]
    is_empty = last["role"] == "assistant" and not last["content"] and "tool_calls" not in last
    return tuple(messages[:-1] if is_empty else messages)


def _grammar(body: PromptBody) -> GrammarSpec | None:
    if body.json_format is None:
        return None
    where, format = body.json_format
    return schema_spec(format.json_schema, f"{where}.schema", where)
