"""A request that passes every stage of its life, for tests in which each of them fails."""

from typing import Any

MODEL = "smollm2-135m-instruct"


def staged_body(number: int, *, stream: bool) -> dict[str, Any]:
    """A chat with a tool and a grammar."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "note", "parameters": schema}}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number}: say a number."}],
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 6,
        "temperature": 0,
        "stream": stream,
    }
