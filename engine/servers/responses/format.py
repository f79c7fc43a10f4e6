"""The `response` object: its initial state, and how it ends."""

import time
from typing import Any

from engine.core.errors import EngineError, InvalidRequestError, RateLimitError
from engine.core.interfaces.backend import ModelCard, UsageEvent
from engine.servers.http.errors import short_message
from engine.servers.responses.items import Item
from engine.servers.responses.output import Output
from engine.servers.responses.schema import ReasoningConfig, ResponseBody
from engine.servers.responses.tools import echo_tools


def outline(body: ResponseBody, response_id: str, card: ModelCard, is_stored: bool) -> Item:
    """A response that has just started: the request's parameters, and no output yet."""
    reasoning = body.reasoning or ReasoningConfig()
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "model": card.id,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": body.text_format.echo,
            "verbosity": None if body.text is None else body.text.verbosity,
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": echo_tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def finished(begun: Item, output: Output, usage: UsageEvent) -> Item:
    """`begun` with its output. It is incomplete if the length limit was reached."""
    ending: Item
    if output.finish is not None and output.finish.reason == "length":
        ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    else:
        ending = {"status": "completed", "completed_at": int(time.time())}
    return begun | ending | {"output": output.items, "usage": usage_body(usage)}


def failed(begun: Item, output: Output, error: EngineError) -> Item:
    """`begun` with the partial output and the error."""
    code = "server_error"
    if isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    ending = {"status": "failed", "error": {"code": code, "message": short_message(error)}}
    return begun | ending | {"output": output.items}


def usage_body(usage: UsageEvent) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # Cache writes are reported as 0: they cost a client nothing.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
