"""Watches the events of an answer for its trace: tool calls, finish reasons, and texts if asked."""

import time

import msgspec

from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
)


class AnswerTap:
    """Sees all events of an answer. Texts are kept only if `keeps_texts` is true."""

    def __init__(self, keeps_texts: bool) -> None:
        self.num_calls = 0
        self.first_call_at = 0.0  # when the first part of the first tool call was parsed
        self.last_call_at = 0.0
        self._reasons: dict[int, str] = {}
        self._keeps_texts = keeps_texts
        self._parts: dict[int, list[dict[str, str]]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, ToolCallEvent):
            self.last_call_at = time.monotonic()
            if event.name is not None:
                self.num_calls += 1
            if not self.first_call_at:
                self.first_call_at = self.last_call_at
            if self._keeps_texts:
                self._add_call(event)
        elif isinstance(event, FinishEvent):
            self._reasons[event.choice] = event.reason
        elif self._keeps_texts and isinstance(event, TextEvent | ReasoningEvent) and event.text:
            kind = "text" if isinstance(event, TextEvent) else "reasoning"
            self._add(event.choice, kind, "content", event.text)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons[choice] for choice in sorted(self._reasons))

    def output_text(self) -> str:
        """The answers as JSON, in the form of `gen_ai.output.messages`."""
        messages = [
            {
                "role": "assistant",
                "parts": parts,
                "finish_reason": self._reasons.get(choice, "error"),
            }
            for choice, parts in sorted(self._parts.items())
        ]
        return msgspec.json.encode(messages).decode()

    def _add_call(self, event: ToolCallEvent) -> None:
        if event.name is not None:
            head = {"type": "tool_call", "id": event.call_id or "", "name": event.name}
            self._parts.setdefault(event.choice, []).append(head)
        self._add(event.choice, "tool_call", "arguments", event.arguments)

    def _add(self, choice: int, kind: str, field: str, text: str) -> None:
        parts = self._parts.setdefault(choice, [])
        if not parts or parts[-1]["type"] != kind:
            parts.append({"type": kind})
        parts[-1][field] = parts[-1].get(field, "") + text


def input_text(request: ChatRequest | CompletionRequest) -> str:
    """The prompt as JSON, in the form of `gen_ai.input.messages`. Images are left out."""
    if isinstance(request, CompletionRequest):
        prompt = request.prompt if isinstance(request.prompt, str) else str(list(request.prompt))
        parts: list[object] = [{"type": "text", "content": prompt}]
        messages: list[dict[str, object]] = [{"role": "user", "parts": parts}]
    else:
        messages = [_input(each) for each in request.messages]
    return msgspec.json.encode(messages).decode()


def _input(message: dict[str, object]) -> dict[str, object]:
    parts: list[dict[str, object]] = []
    calls = message.get("tool_calls")
    if message["role"] == "tool":
        parts.append(
            {
                "type": "tool_call_response",
                "id": message.get("tool_call_id"),
                "response": message.get("content"),
            }
        )
    elif message.get("content"):
        parts.append({"type": "text", "content": message["content"]})
    for call in calls if isinstance(calls, list) else ():
        function = call["function"]
        parts.append({"type": "tool_call", "id": call.get("id"), **function})
    return {"role": message["role"], "parts": parts}
