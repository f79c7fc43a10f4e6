"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`: every field and its bounds.

Types are strict and null equals a missing field. The `BlockReader` in the validation context parses
messages, system and tools (see `blocks.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from engine.servers.anthropic.blocks import BlockReader
from engine.servers.http.errors import problem
from engine.servers.schema import fields
from engine.servers.schema.messages import MAX_MESSAGES, MAX_TOOLS

# Claude Code asks to keep all thinking, which always happens.
KEEP_ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# Unsupported parameters -> their accepted no-op values, besides null.
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
    json_schema: Any = Field(alias="schema")  # named `schema` in JSON


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
    """Fields that determine the prompt: the whole body of `count_tokens`."""

    model_config = _STRICT

    model: fields.ModelName
    messages: Messages
    system: str | list[Any] | None = None
    tools: Tools = ()
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # older name of output_config.format
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "PromptBody":
        if self.output_format and self.output_config and self.output_config.format:
            raise problem("output_format", "is the older name of output_config.format; send one")
        return self

    @property
    def json_format(self) -> tuple[str, JsonFormat] | None:
        """The field name and the required output format, or None."""
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
    # accepted without effect: there is one tier
    service_tier: Literal["auto", "standard_only"] | None = None
