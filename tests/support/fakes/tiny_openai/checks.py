"""What the tiny server refuses."""

import json
import math
from typing import Any

from tests.support.fakes.tiny_openai.model import CONTEXT_LENGTH, NUM_TOKENS, Mistake, num_tokens

MODEL = "tiny/words"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# name -> type, lowest, highest
NUMBERS = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "n": (int, 1, 16),
    "max_tokens": (int, 1, 10**6),
    "max_completion_tokens": (int, 1, 10**6),
    "top_logprobs": (int, 0, 20),
    "presence_penalty": (float, -2, 2),
    "seed": (int, -(2**63), 2**64),
    "best_of": (int, 1, 16),
}


def parse(raw: bytes) -> dict[str, Any]:
    def no_constant(name: str) -> Any:
        raise ValueError(name)

    try:
        body = json.loads(raw, parse_constant=no_constant)
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Mistake("the body is not JSON", "body") from None
    if not isinstance(body, dict):
        raise Mistake("the body is no object", "body")
    return body


def check_model(body: dict[str, Any]) -> None:
    if body.get("model", MODEL) != MODEL:
        raise Mistake(f"there is no model {body.get('model')}", "model", 404)


def check_numbers(body: dict[str, Any]) -> None:
    for name, (kind, low, high) in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        is_right = isinstance(value, int if kind is int else int | float)
        if not is_right or not math.isfinite(value) or not low <= value <= high:
            status = 429 if name == "n" and value == 1000 else 400
            raise Mistake(f"{name} should be from {low} to {high}", name, status)


def check_parameters(body: dict[str, Any]) -> None:
    check_numbers(body)
    if "no_such_parameter" in body:
        raise Mistake("no_such_parameter is unknown", "no_such_parameter")
    if not isinstance(body.get("stream"), bool | None):
        raise Mistake("stream should be true or false", "stream")
    if body.get("stream_options") and not body.get("stream"):
        raise Mistake("stream_options needs stream", "stream_options")
    stop = body.get("stop")
    if not isinstance(stop, str | list | None):
        raise Mistake("stop should be a string or a list", "stop")
    bias = body.get("logit_bias") or {}
    if not isinstance(bias, dict) or any(
        not key.isdecimal() or int(key) >= NUM_TOKENS for key in bias
    ):
        raise Mistake("logit_bias should be by token id", "logit_bias")


def check_fits(num_prompt: int) -> None:
    if num_prompt > CONTEXT_LENGTH:
        raise Mistake(
            f"This model's maximum context length is {CONTEXT_LENGTH} tokens.", "messages"
        )


def read_messages(messages: Any) -> tuple[str, int]:
    """All text of a conversation, and the number of its tokens."""
    if not isinstance(messages, list) or not messages:
        raise Mistake("messages should be a list with entries", "messages")
    texts = []
    for message in messages:
        if message.get("role") not in ROLES:
            raise Mistake(f"{message.get('role')} is no role", "messages")
        texts.append(read_content(message.get("content")))
    text = " ".join(texts)
    count = num_tokens(text) + 3 * len(messages)
    check_fits(count)
    return text, count


def read_content(content: Any) -> str:
    if isinstance(content, str | None):
        return content or ""
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text", "tool_use", "tool_result"):
            raise Mistake(f"{part.get('type')} is no part", "messages")
    return " ".join(str(part.get("text") or part.get("content") or "") for part in content)


def read_prompts(value: Any) -> list[tuple[str, int]]:
    """Text and number of tokens of each prompt."""
    if isinstance(value, str):
        return [(value, max(1, num_tokens(value)))]
    if not isinstance(value, list):
        raise Mistake("prompt should be text, ids or lists of them", "prompt")
    if all(isinstance(each, int) for each in value):
        if not value or any(each >= NUM_TOKENS for each in value):
            raise Mistake("prompt has ids that are not there", "prompt")
        return [(" ".join(map(str, value)), len(value))]
    return [prompt for each in value for prompt in read_prompts(each)]
