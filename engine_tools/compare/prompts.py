"""Reads a file with one prompt or conversation per line.

In a .jsonl file, a line is a JSON string, a list of messages, or an object with `prompt` or
`messages` and optionally an `id`. In any other file, each line is a prompt as plain text.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.base import InferenceBackend
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    GenerationContext,
)

ROLES = ("system", "user", "assistant")
_FIELDS = {"id", "prompt", "messages"}


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    id: str
    content: str | tuple[dict[str, Any], ...]  # a text that the model continues, or a chat

    @property
    def capability(self) -> str:
        return "completions" if isinstance(self.content, str) else "chat"

    def ask(self, backend: InferenceBackend, context: GenerationContext) -> AsyncIterator[Event]:
        if isinstance(self.content, str):
            return backend.complete(CompletionRequest(context=context, prompt=self.content))
        return backend.chat(ChatRequest(context=context, messages=self.content))


def read_prompts(path: Path, *, as_chat: bool = False) -> list[ComparedPrompt]:
    """Read a file of prompts. With `as_chat`, each text becomes a user message. If a line is
    invalid, raises `InvalidRequestError` with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} can't be read: {error}", param="prompts") from None
    is_json = path.suffix in (".jsonl", ".ndjson")
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = (
                _from_json(path, number, line) if is_json else ComparedPrompt(str(number), line)
            )
            prompts.append(_in_chat(prompt) if as_chat else prompt)
    if not prompts:
        raise InvalidRequestError(f"{path} has no prompts", param="prompts")
    return prompts


def _in_chat(prompt: ComparedPrompt) -> ComparedPrompt:
    if isinstance(prompt.content, str):
        return ComparedPrompt(prompt.id, ({"role": "user", "content": prompt.content},))
    return prompt


def _from_json(path: Path, number: int, line: str) -> ComparedPrompt:
    def refuse(reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"{path}, line {number}: {reason}", param="prompts")

    try:
        value = json.loads(line)
    except ValueError as error:
        raise refuse(f"this is not JSON ({error})") from None
    if isinstance(value, str):
        value = {"prompt": value}
    elif isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise refuse("give a string, a list of messages, or an object with prompt or messages")
    if unknown := sorted(value.keys() - _FIELDS):
        raise refuse(f"unknown field '{unknown[0]}'; there are {', '.join(sorted(_FIELDS))}")
    name = str(value.get("id", number))
    if "prompt" in value:
        if not isinstance(value["prompt"], str) or not value["prompt"]:
            raise refuse("prompt must be a text")
        return ComparedPrompt(name, value["prompt"])
    if reason := _fault(value["messages"]):
        raise refuse(reason)
    return ComparedPrompt(name, tuple(value["messages"]))


def _fault(messages: Any) -> str | None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return "messages must be a list with at least one message"
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.keys() != {"role", "content"}
            or message["role"] not in ROLES
            or not isinstance(message["content"], str)
        ):
            return f"a message is a role ({', '.join(ROLES)}) and a content, which is a text"
    return None
