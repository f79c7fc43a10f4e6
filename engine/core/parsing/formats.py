"""The tool call format of a model: its row, and what the parser, grammar and prompt need of it."""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.call_grammars import call_syntax
from engine.core.parsing.grammars import answer_grammar, channel_grammar, tool_grammar
from engine.core.parsing.rows import CallPart, CallRow, parts_of
from engine.core.parsing.tool_formats import CALL_ROWS, JSON, LLAMA3, PYTHONIC
from engine.core.parsing.values import element_text, python_literal, quoted_literal
from engine.core.text.chat_template import code_words

Tool = Mapping[str, Any]
_NO_CONTROL: Mapping[str, int] = {}
_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class TemplateHabits:
    """What a chat template does with parts of a conversation."""

    takes_system: bool = True  # whether it renders a system message
    # Where it reads tools from: its variable `tools`, JSON text in the system message, or nowhere.
    tools_in: Literal["variable", "system", "nowhere"] = "variable"
    writes_calls: bool = True  # whether it renders the calls of earlier turns
    json_arguments: bool = False  # whether it wants arguments as JSON text, not as an object
    null_content: bool = False  # whether calls are only rendered if the content is None


@dataclass(frozen=True)
class ToolFormat:
    """The tool call format of one model.

    If `native`, the chat template renders tools. Otherwise the tools are described in a message.
    The argument `control` of methods maps the text of control tokens to their ids.
    """

    row: CallRow
    native: bool

    @property
    def name(self) -> str:
        return self.row.name

    def new_call_id(self) -> str:
        if self.row.short_ids:
            return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def template_call_id(self, call_id: str) -> str:
        """Convert a client's call id to one that the template accepts."""
        if not self.row.short_ids or _ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Render calls as the model would write them. A call is a pair of name and JSON
        arguments.
        """
        row = self.row
        written = [_written(row, index, *call) for index, call in enumerate(calls)]
        if row is JSON and len(written) > 1:
            return f"[{row.between.join(written)}]"
        if row.messages is not None:
            return row.messages.close.join(written)
        return f"{row.before}{row.between.join(written)}{row.after}"

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        control: Mapping[str, int] = _NO_CONTROL,
        *,
        answer: str | None = None,
        thought: str = "",
    ) -> str | None:
        """The grammar of an answer; None if any text is allowed.

        `answer` is a grammar for an answer without tool calls. `thought` is the marker, as text, of
        an optional reasoning block before the output; free text must then not begin with it. If
        calls are optional, `answer` is given and the format has no call marker, calls and answers
        could not be told apart. This raises an `InvalidRequestError`.
        """
        if choice.mode == "none" or not tools:
            return answer
        if choice.mode == "named":
            tools = [tool for tool in tools if tool["function"]["name"] == choice.name]
            if not tools:
                raise InvalidRequestError(
                    f"There is no tool named {choice.name!r} to be called.", param="tool_choice"
                )
            parallel = False
        syntax = call_syntax(self.row, tools, parallel, control)
        forced = choice.mode != "auto"
        if self.row.messages is not None:
            return channel_grammar(self.row.messages, syntax, control, forced=forced, answer=answer)
        if not forced and answer is not None:
            if syntax.opening is None:
                raise InvalidRequestError(
                    "This model writes tool calls as plain JSON, so the answer's format and tools "
                    "that may or may not be called exclude each other; set tool_choice to 'none', "
                    "or leave response_format out.",
                    param="tool_choice",
                )
            return answer_grammar(syntax, answer)
        return tool_grammar(syntax, forced=forced, thought=thought)


def _written(row: CallRow, index: int, name: str, arguments: str) -> str:
    pattern = row.call.replace("{object}", row.object)
    if row.messages is not None:
        pattern = f"{row.headers[0]}{row.before}{pattern}{row.after}"
    texts = {"name": name, "index": str(index), "id": f"{index:0>9}"}
    written = ""
    for part in parts_of(pattern):
        if isinstance(part, str):
            written += part
        elif part == CallPart("args"):
            written += _written_arguments(row, arguments)
        else:
            written += texts[part.name]
    return written


def _written_arguments(row: CallRow, arguments: str) -> str:
    if row.encoding == "json":
        return arguments
    values = json.loads(arguments)
    if row.encoding == "python":
        return ", ".join(f"{key}={python_literal(value)}" for key, value in values.items())
    if row.encoding == "quoted":
        return quoted_literal(values, row.quote)
    written = ""
    for key, value in values.items():
        kind = _KINDS.get(type(value), "number")
        texts = {"key": key, "value": element_text(value), "type": kind}
        texts["string"] = "true" if isinstance(value, str) else "false"
        parts = parts_of(row.param)
        written += "".join(part if isinstance(part, str) else texts[part.name] for part in parts)
    return written


_KINDS: dict[type, str] = {str: "string", bool: "boolean", list: "array", dict: "object"}
# A JSON call with a name and arguments that the template shows as an example to the model. Its
# quotes may be escaped.
_SHOWN_CALL = re.compile(r"name[\\\"']+ ?:.{0,200}?arguments[\\\"']+ ?:", re.DOTALL)
_SHOWN_LIST = re.compile(r"\[\{\\?[\"']name\\?[\"']:")
_SHOWN_PYTHON = re.compile(r"\[func_name1\(")


def uses_tools(template: str) -> bool:
    """Whether the template's code reads the list of tools."""
    return not code_words(template).isdisjoint({"tools", "functions"})


def known_format(template: str | None) -> ToolFormat | None:
    """The format whose row fits the template's source. None if no row fits."""
    source = template or ""
    native = uses_tools(source)
    row = next((row for row in CALL_ROWS if all(sign in source for sign in row.signs)), None)
    return None if row is None else ToolFormat(row, native)


def guessed_format(template: str | None) -> ToolFormat | None:
    """The format of a template that shows the model an unmarked call. None if it shows none."""
    source = template or ""
    native = uses_tools(source)
    if native and _SHOWN_PYTHON.search(source):
        return ToolFormat(PYTHONIC, native)
    if native and _SHOWN_LIST.search(source):
        return ToolFormat(JSON, native)
    if native and "<|start_header_id|>" in source:
        return ToolFormat(LLAMA3, native)
    if native and _SHOWN_CALL.search(source):
        return ToolFormat(JSON, native)
    return None
