"""/v1/responses and /v1/messages of the tiny server."""

from typing import Any

from tests.support.fakes.tiny_openai.checks import (
    MODEL,
    check_fits,
    check_model,
    check_numbers,
    read_content,
    read_messages,
)
from tests.support.fakes.tiny_openai.model import (
    Answer,
    Mistake,
    called,
    fixed,
    generate,
    num_tokens,
    structured,
)
from tests.support.fakes.tiny_openai.openai_api import new_id

Stored = dict[str, tuple[dict[str, Any], str]]  # id -> the response, and all text until then


class Response:
    """One request to /v1/responses; kept in `stored` unless it asks not to be."""

    def __init__(self, body: dict[str, Any], stored: Stored) -> None:
        check_model(body)
        check_numbers(body)
        if "input" not in body:
            raise Mistake("input is missing", "input")
        history = body.get("instructions") or ""
        if (previous := body.get("previous_response_id")) is not None:
            if previous not in stored:
                raise Mistake(f"there is no response {previous}", "previous_response_id", 404)
            history += " " + stored[previous][1]
        given = body["input"]
        text = (
            given
            if isinstance(given, str)
            else " ".join(read_content(item.get("content")) for item in given)
        )
        prompt = f"{history} {text}".strip()
        check_fits(num_tokens(prompt))
        answer = generate(prompt, body, body.get("max_output_tokens") or 50)
        decided = structured((body.get("text") or {}).get("format"))
        answer = answer if decided is None else fixed(decided)
        if num_tokens(prompt) < 6 and "Count" in prompt:
            answer = Answer(answer.tokens, "length")
        self.answer = answer
        self.body = self._build(body, prompt, answer)
        if body.get("store", True):
            stored[self.body["id"]] = (self.body, f"{prompt} {answer.text}")

    def _build(self, body: dict[str, Any], prompt: str, answer: Answer) -> dict[str, Any]:
        is_cut = answer.finish == "length"
        num_input, num_output = num_tokens(prompt), len(answer.tokens)
        counts = {"input_tokens": num_input, "output_tokens": num_output}
        return {
            "id": new_id("resp"),
            "object": "response",
            "created_at": 1_700_000_000,
            "model": MODEL,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(body, answer)],
            "store": body.get("store", True),
            "usage": counts | {"total_tokens": num_input + num_output},
        }

    def _item(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        offered = body.get("tools") or []
        tools = [{"function": tool} for tool in offered if tool["type"] == "function"]
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            choice = {"function": choice}
        call = called(tools, choice)
        if call is not None:
            item = {"type": "function_call", "id": new_id("fc"), "call_id": new_id("call")}
            return item | {"name": call[0], "arguments": call[1]}
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        message = {"type": "message", "id": new_id("msg"), "role": "assistant"}
        return message | {"status": "completed", "content": [part]}

    def chunks(self) -> list[Any]:
        item = self.body["output"][0]
        part = item["content"][0]
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": self.body | {"status": "in_progress"}},
            {"type": "response.output_item.added", "item": item},
            {"type": "response.content_part.added", "part": part},
            *(
                {"type": "response.output_text.delta", "delta": token}
                for token in self.answer.tokens
            ),
            {"type": "response.output_text.done", "text": part["text"]},
            {"type": "response.content_part.done", "part": part},
            {"type": "response.output_item.done", "item": item},
            {"type": f"response.{self.body['status']}", "response": self.body},
        ]
        return [event | {"sequence_number": number} for number, event in enumerate(events)]


class Message:
    """One request to /v1/messages."""

    def __init__(self, body: dict[str, Any]) -> None:
        check_model(body)
        if body.get("max_tokens") is None:
            raise Mistake("max_tokens is missing", "max_tokens")
        if "thread" in body:
            raise Mistake("there are no threads", "thread")
        text, self.num_input = count(body)
        self.answer = generate(text, body, body["max_tokens"])
        tools = [
            {"function": {"name": tool["name"], "parameters": tool["input_schema"]}}
            for tool in body.get("tools") or []
        ]
        choice = (body.get("tool_choice") or {}).get("type")
        self.call = called(tools, "required" if choice == "any" else choice)

    @property
    def body(self) -> dict[str, Any]:
        reasons = {"length": "max_tokens", "stop": "end_turn"}
        reason = "stop_sequence" if self.answer.stop else reasons[self.answer.finish]
        content: dict[str, Any] = {"type": "text", "text": self.answer.text}
        if self.call is not None:
            reason = "tool_use"
            content = {"type": "tool_use", "id": new_id("toolu"), "name": self.call[0]}
            content |= {"input": {"city": "Paris"}}
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [content],
            "stop_reason": reason,
            "stop_sequence": self.answer.stop,
            "usage": {"input_tokens": self.num_input, "output_tokens": len(self.answer.tokens)},
        }

    def chunks(self) -> list[Any]:
        body = self.body
        deltas = [{"type": "text_delta", "text": token} for token in self.answer.tokens]
        ending = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        return [
            {"type": "message_start", "message": body | {"content": [], "stop_reason": None}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
            *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ending, "usage": body["usage"]},
            {"type": "message_stop"},
        ]


def count(body: dict[str, Any]) -> tuple[str, int]:
    """The text of a request in Anthropic's shape, and the number of its tokens."""
    text, num_input = read_messages(body.get("messages"))
    return text, num_input + num_tokens(read_content(body.get("system")))
