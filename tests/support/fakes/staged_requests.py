"""A request that passes through every stage, for tests that make each stage fail."""

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
