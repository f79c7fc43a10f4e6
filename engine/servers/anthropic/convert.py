"""Converts an Anthropic body to a `ChatRequest`.

Thinking is a template option, if the template has one. It is off by default, because Anthropic's
clients expect the first block to be text.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from engine.core.interfaces.backend import (
    GrammarSpec,
    ModelCard,
    ToolChoice,
)
from engine.servers.anthropic.blocks import BlockReader, with_system
from engine.servers.anthropic.schema import NO_EFFECT, MessagesBody, PromptBody, ToolChoiceBody
from engine.servers.http.errors import invalid_request, problem
from engine.servers.schema.body import SamplingBody, drop_no_effect
from engine.servers.schema.messages import check_format_and_choice, known_name
from engine.servers.schema.structured import schema_spec
from engine.servers.serving.chat import ChatAsk, effort_options
from engine.servers.serving.services import Services

# Template option names that enable thinking.
_THINKING_OPTIONS = ("enable_thinking", "thinking")

Tools = tuple[dict[str, Any], ...]
Kind = TypeVar("Kind", bound=PromptBody)


@dataclass(frozen=True)
class AnthropicPrompt:
    """The part of a body that determines the prompt, independent of the model."""

    messages: tuple[dict[str, Any], ...]
    tools: Tools
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    continues_answer: bool  # the last message is the start of the answer
    grammar: GrammarSpec | None
    warnings: dict[str, str]

    def ask(self, card: ModelCard, options: dict[str, Any]) -> ChatAsk:
        return ChatAsk(
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
    """Validate a body. Raises `InvalidRequestError` naming field, rule and given value."""
    reader = BlockReader()
    try:
        body = kind.model_validate(
            drop_no_effect(raw, kind.model_fields, NO_EFFECT), context=reader
        )
    except ValidationError as error:
        raise invalid_request(error) from None
    reader.cache_control(body.cache_control, "cache_control")
    tools = body.tools
    messages = with_system(body.messages, reader.system(body.system or ""))
    choice, grammar = _tool_choice(body.tool_choice, tools), _grammar(body)
    check_format_and_choice(grammar, choice)
    prompt = AnthropicPrompt(
        messages=_without_empty_start(messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (
            body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        ),
        continues_answer=_continues(messages),
        grammar=grammar,
        warnings=reader.warnings,
    )
    return body, prompt


def sampling_body(body: MessagesBody) -> SamplingBody:
    """The sampling parameters under the names that the other APIs use."""
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
    """Template options for the body. Warns about those that the model's template lacks."""
    options: dict[str, Any] = {}
    wants_thinking = body.thinking is not None and body.thinking.type != "disabled"
    switches = [name for name in _THINKING_OPTIONS if name in card.template_options]
    if switches:
        options[switches[0]] = wants_thinking
    elif wants_thinking and "reasoning" not in card.capabilities:
        services.warn(request, "thinking", "this model does not think before it answers")
    elif body.thinking is not None and not wants_thinking and "reasoning" in card.capabilities:
        services.warn(request, "thinking", "this model can't be kept from thinking")
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        what = "only max_tokens is enforced, for thinking and answer"
        services.warn(request, "thinking.budget_tokens", what)
    effort = body.output_config.effort if body.output_config is not None else None
    # "high" is the default behaviour of models without effort levels.
    if effort == "high" and "reasoning_effort" not in card.template_options:
        return options
    return options | effort_options(services, request, card, effort, "output_config.effort")


def _tool_choice(value: ToolChoiceBody | None, tools: Tools) -> ToolChoice:
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
    """Drop an empty assistant message at the end: there is nothing to continue."""
    last = messages[-1]
    is_empty = last["role"] == "assistant" and not last["content"] and "tool_calls" not in last
    return tuple(messages[:-1] if is_empty else messages)


def _grammar(body: PromptBody) -> GrammarSpec | None:
    if body.json_format is None:
        return None
    where, format = body.json_format
    return schema_spec(format.json_schema, f"{where}.schema", where)
