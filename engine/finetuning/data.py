"""Reads training files: JSON lines of conversations, prompts with completions, or preferences.

The formats are OpenAI's. Every line is checked before a job starts, and an error names the line.
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.core.errors import InvalidRequestError

Method = Literal["supervised", "dpo"]
MAX_LINE_BYTES = 2**20  # a line is parsed in one piece, meanwhile no other thread runs
MAX_DEPTH = 64
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_KEYS = {"role", "content", "name", "weight", "tool_calls", "tool_call_id"}


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation. The model is trained on the messages at the indices in `trained`."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    trained: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionExample:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """A conversation, and two answers to it, of which people prefer the first."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    preferred: str
    rejected: str


Example = ChatExample | CompletionExample | PreferenceExample


def read_examples(path: Path, method: Method, param: str = "training_file") -> list[Example]:
    """All examples of a file. Raises `InvalidRequestError` with the number of the first wrong
    line.
    """
    return list(_examples(path, method, param))


def count_examples(path: Path, method: Method, param: str = "training_file") -> int:
    """Like `read_examples`, but only counts, because a file may be far larger than a server's
    memory should be.
    """
    return sum(1 for _ in _examples(path, method, param))


def _examples(path: Path, method: Method, param: str) -> Iterator[Example]:
    kind: type[Example] | None = None
    what = f"the {param.replace('_', ' ')}"
    for number, line in _lines(path, param):
        try:
            example = parse_example(line, method)
            if kind not in (None, type(example)):
                raise ValueError("this line has another format than the first one")
        except ValueError as error:
            raise InvalidRequestError(
                f"line {number} of {what}: {error}", param=param, code="invalid_file"
            ) from None
        kind = type(example)
        yield example
    if kind is None:
        raise InvalidRequestError(f"{what} has no examples", param=param, code="invalid_file")


def _lines(path: Path, param: str) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidRequestError(
                        f"line {number} of the {param.replace('_', ' ')} has more than"
                        f" {MAX_LINE_BYTES:,} bytes",
                        param=param,
                        code="invalid_file",
                    )
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InvalidRequestError(f"{path} can't be read: {error.strerror}", param=param) from None


def parse_example(line: bytes, method: Method) -> Example:
    """Parse one line. Raises `ValueError` with the reason if it is wrong."""
    try:
        text = line.decode("utf-8-sig").rstrip()  # without the end of the line, columns are right
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8 ({error.reason})") from None
    value = _decoded(text, "this")
    if not isinstance(value, dict):
        raise ValueError("an example is a JSON object")
    if method == "dpo" and ("messages" in value or "prompt" in value):
        raise ValueError(
            "this is an example for the method supervised; dpo needs input, preferred_output and"
            " non_preferred_output"
        )
    if method == "supervised" and "preferred_output" in value:
        raise ValueError("this is a preference, which the method dpo trains")
    if method == "dpo":
        return _read(value, {"input", "preferred_output", "non_preferred_output"}, _preference)
    if "messages" in value:
        return _read(value, {"messages", "tools", "parallel_tool_calls"}, _chat)
    if "prompt" in value:
        return _read(value, {"prompt", "completion"}, _completion)
    raise ValueError("give messages, or prompt and completion")


def _decoded(text: str, what: str) -> Any:
    """The value of a JSON text, which chat templates can print. Raises `ValueError` about `what`
    if it is wrong.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
        if "\\ud" in text.lower():  # half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON ({error.msg} at column {error.colno})") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not UTF-8 ({error.reason})") from None
    except RecursionError:
        raise ValueError(f"{what} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON ({error})") from None
    inner, depth = [value], 0
    while inner := [each for outer in inner for each in _elements(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{what} is nested more than {MAX_DEPTH} levels deep")
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _elements(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _read(
    value: dict[str, Any], known: set[str], parse: Callable[[dict[str, Any]], Example]
) -> Example:
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"unknown field '{unknown[0]}'; there are {', '.join(sorted(known))}")
    return parse(value)


def _chat(value: dict[str, Any]) -> ChatExample:
    messages = _messages(value["messages"])
    trained = tuple(
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.pop("weight", 1)
    )
    if not trained:
        raise ValueError("there is no message of the assistant to train on, with a weight of 1")
    return ChatExample(messages, _tools(value.get("tools")), trained)


def _completion(value: dict[str, Any]) -> CompletionExample:
    prompt, completion = value["prompt"], value.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
        raise ValueError("prompt and completion must be texts")
    return CompletionExample(prompt, completion)


def _preference(value: dict[str, Any]) -> PreferenceExample:
    asked = value.get("input")
    if not isinstance(asked, dict) or "messages" not in asked:
        raise ValueError("input must be an object with messages")
    answers = []
    for name in ("preferred_output", "non_preferred_output"):
        found = value.get(name)
        if not isinstance(found, list) or len(found) != 1:
            raise ValueError(f"{name} must be a list with one message of the assistant")
        (message,) = _messages(found)
        if message["role"] != "assistant" or not message["content"]:
            raise ValueError(f"{name} must be a message of the assistant with a text")
        answers.append(message["content"])
    messages = _messages(asked["messages"])
    return PreferenceExample(messages, _tools(asked.get("tools")), *answers)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError("tools must be a list of tools")
    return tuple(value)


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a list with at least one message")
    return tuple(_message(index, each) for index, each in enumerate(value))


def _message(index: int, value: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise ValueError(f"{where} must have a role: {', '.join(_ROLES)}")
    if unknown := sorted(value.keys() - _MESSAGE_KEYS):
        raise ValueError(f"{where} has an unknown field '{unknown[0]}'")
    if value.get("weight", 1) not in (0, 1):
        raise ValueError(f"{where}: weight must be 0 or 1")
    for name in ("name", "tool_call_id"):
        if not isinstance(value.get(name, ""), str):
            raise ValueError(f"{where}: {name} must be a text")
    calls = value.get("tool_calls")
    content = value.get("content")
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(f"{where}: content must be a text")
    role = "system" if value["role"] == "developer" else value["role"]
    message = value | {"role": role, "content": content or ""}
    if calls is not None:
        message["tool_calls"] = _calls(where, calls)
    return message


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Tool calls, with their arguments as objects, as chat templates need them."""
    if not isinstance(value, list):
        raise ValueError(f"{where}: tool_calls must be a list")
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        name, text = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(
                f"{where}: a tool call has a function with name and arguments, a JSON text"
            )
        arguments = _decoded(text, f"{where}: the text of a tool call's arguments")
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}: the arguments of a tool call must be a JSON object")
        calls.append({**call, "function": {"name": name, "arguments": arguments}})
    return calls
