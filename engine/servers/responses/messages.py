"""Converts items of the Responses API to chat messages.

The items of one answer (reasoning, text, calls) become one assistant message. So the prompt starts
with exactly the tokens of the previous turn and can reuse its cached blocks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.servers.http.errors import problem
from engine.servers.responses.items import IMAGE_PART
from engine.servers.schema.images import Content, image_from_url
from engine.servers.schema.messages import parse_arguments

Item = dict[str, Any]


def to_messages(
    instructions: str | None, earlier: Iterable[Item], own: Sequence[Item], source: str
) -> tuple[dict[str, Any], ...]:
    """Convert items to chat messages. An error in an `earlier` (stored) item names `source`, the
    parameter by which the client named them. An error in one of `own`, the request's items, names
    its place in `input`.
    """
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    for item in earlier:
        conversation.add(item, source)
    for index, item in enumerate(own):
        conversation.add(item, f"input[{index}]")
    return tuple(conversation.messages)


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}  # tool call id -> function name

    def add(self, item: Item, where: str) -> None:
        kind = item["type"]
        if kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "compaction":
            self._add_summary(item["encrypted_content"])
        elif kind == "function_call":
            self._add_call(item, where)
        elif kind == "function_call_output":
            self._add_result(item, where)
        elif item["role"] == "assistant":
            self._add_answer("".join(_texts(item["content"])))
        else:
            # `developer` is the newer name of `system`; chat templates only know `system`.
            role = "user" if item["role"] == "user" else "system"
            self.messages.append({"role": role, **_content(item["content"], where)})

    def _add_reasoning(self, item: Item) -> None:
        text = "".join(part["text"] for part in item.get("content") or item["summary"])
        if text:
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})

    def _add_summary(self, text: str) -> None:
        """Add a summary of an earlier conversation to the system message."""
        summary = f"Summary of the conversation so far:\n{text}"
        if self.messages and self.messages[0]["role"] == "system":
            first = self.messages[0]
            self.messages[0] = first | {"content": f"{first['content']}\n\n{summary}"}
        else:
            self.messages.insert(0, {"role": "system", "content": summary})

    def _add_answer(self, text: str) -> None:
        last = self._last_of_assistant()
        # If the last message has only reasoning so far, this text belongs to the same answer.
        if last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = text
        else:
            self.messages.append({"role": "assistant", "content": text})

    def _add_call(self, item: Item, where: str) -> None:
        try:
            arguments = parse_arguments(item["arguments"], f"{where}.arguments")
        except InvalidRequestError:
            if item["status"] == "incomplete":
                return  # the call was cut off, so it has no result
            raise
        message = self._last_of_assistant()
        if message is None:
            message = {"role": "assistant", "content": ""}
            self.messages.append(message)
        message.setdefault("tool_calls", []).append(
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": arguments},
            }
        )
        self._called[item["call_id"]] = item["name"]

    def _add_result(self, item: Item, where: str) -> None:
        call_id, output = item["call_id"], item["output"]
        if call_id not in self._called:
            rule = "answers no call: no function_call before it has this call_id"
            raise problem(f"{where}.call_id", rule)
        text = output if isinstance(output, str) else "\n".join(_texts(output))
        name = self._called[call_id]
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}
        )

    def _last_of_assistant(self) -> dict[str, Any] | None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return None


def _content(parts: Iterable[Item], where: str) -> dict[str, Any]:
    content = Content()
    for part in parts:
        if part["type"] == IMAGE_PART:
            content.add_image(image_from_url(part["image_url"], where), where)
        else:
            content.add_text(*_texts([part]))
    return content.fields


def _texts(parts: Iterable[Item]) -> list[str]:
    return [part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts]
