"""Tool call formats of model families. The chat template decides which format a model has.

If the format of the template is not one of these, the template's support of tools is not used.
Instead, a message describes the tools and asks the model to write calls as plain JSON.
"""

import hashlib
import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.calls import CallReader
from engine.core.parsing.grammars import (
    CallSyntax,
    answer_grammar,
    arguments_rule,
    literal,
    marker,
    object_calls,
    tool_grammar,
)
from engine.core.parsing.source import NotACall, Source, Steps

Tool = Mapping[str, Any]
_NO_CONTROL: Mapping[str, int] = {}


@dataclass(frozen=True)
class ToolFormat(ABC):
    """The tool call format of one model family.

    If `native` is true, the chat template renders tools and calls. If `has_system` is true, the
    template accepts a system message. The argument `control` of methods maps the text of control
    tokens to their ids.
    """

    name: ClassVar[str]
    # Texts that the parser must see. If such a text is a control token, the detokenizer must not
    # skip it.
    markers: ClassVar[tuple[str, ...]]
    # Whether the template refuses messages with more than one call.
    one_call_per_message: ClassVar[bool] = False
    native: bool
    has_system: bool = True

    @abstractmethod
    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        """Parse the whole output into calls and text."""

    @abstractmethod
    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        """The grammar rules for calls of these tools. If `parallel` is false, only one call is
        allowed.
        """

    @abstractmethod
    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Render calls as the model would write them. A call is a pair of name and JSON
        arguments.
        """

    def new_call_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def template_call_id(self, call_id: str) -> str:
        """Convert a client's call id to one that the template accepts."""
        return call_id

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        control: Mapping[str, int] = _NO_CONTROL,
        *,
        answer: str | None = None,
        may_think: bool = False,
    ) -> str | None:
        """The grammar of an answer; None if any text is allowed.

        `answer` is a grammar for an answer without tool calls. `may_think` says that an optional
        reasoning block precedes the output; free text must then not match such a block. An
        `InvalidRequestError` is raised if calls are optional, `answer` is given and the format has
        no call marker, because calls and answers could not be told apart.
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
        syntax = self.syntax(tools, parallel, control)
        if choice.mode == "auto" and answer is not None:
            if syntax.opening is None:
                raise InvalidRequestError(
                    "This model writes tool calls as plain JSON, so the answer's format and tools "
                    "that may or may not be called exclude each other; set tool_choice to 'none', "
                    "or leave response_format out.",
                    param="tool_choice",
                )
            return answer_grammar(syntax, answer)
        return tool_grammar(syntax, forced=choice.mode != "auto", may_think=may_think)


def call_object(name: str, arguments: str, arguments_key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{arguments_key}": {arguments}}}'


OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class HermesFormat(ToolFormat):
    name = "hermes"
    markers = (OPEN, CLOSE)

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        yield from source.skip_space()
        while (yield from source.text_until(OPEN)):
            source.take(len(OPEN))
            try:
                yield from calls.read()
            except NotACall:
                calls.give_up()
                continue
            yield from source.skip_space()
            if (yield from source.starts_with(CLOSE)):
                source.take(len(CLOSE))
                source.discard()
                yield from source.skip_space()

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        opening = marker(OPEN, control)
        block = f"block: SPACE call SPACE {marker(CLOSE, control)}"
        return CallSyntax(
            rules=f"{block}\n{object_calls(tools, 'arguments')}",
            opening=opening,
            first="block",
            more=f"(SPACE {opening} block)*" if parallel else "",
        )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(f"{OPEN}\n{call_object(*call, 'arguments')}\n{CLOSE}" for call in calls)


TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Llama3Format(ToolFormat):
    name = "llama3"
    markers = (TAG,)
    one_call_per_message = True

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        if (yield from source.skip_space()) == "{":
            yield from _series(source, calls)
        while (yield from source.text_until(TAG)):
            source.take(len(TAG))
            yield from _series(source, calls)

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        return CallSyntax(
            rules=object_calls(tools, "parameters"),
            opening=marker(TAG, control),
            first="call",
            more="(/; ?/ call)*" if parallel else "",
            bare_text=r"/([ \n]*[^ \n{](.|\n)*)?/",
        )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(call_object(*call, "parameters") for call in calls)


def _series(source: Source, calls: CallReader) -> Steps[None]:
    try:
        yield from calls.read_series()
    except NotACall:
        calls.give_up()


CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"[A-Za-z0-9]{9}")
_MAX_ID_CHARS = 64


@dataclass(frozen=True)
class MistralFormat(ToolFormat):
    name = "mistral"
    markers = (CALLS, CALL_ID, ARGS)
    has_args_marker: bool = False

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        yield from source.skip_space()
        while (yield from source.text_until(CALLS)):
            source.take(len(CALLS))
            try:
                if (yield from source.skip_space()) == "[":
                    yield from calls.read_list()
                else:
                    yield from _named_call(source, calls)
            except NotACall:
                calls.give_up()
            else:
                yield from source.skip_space()

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        opening = marker(CALLS, control)
        if not self.has_args_marker:
            more = '(", " call)*' if parallel else ""
            listed = f'listed: SPACE "[" call {more} "]"'
            rules = f"{listed}\n{object_calls(tools, 'arguments')}"
            return CallSyntax(rules, opening, "listed", "")
        args = marker(ARGS, control)
        lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            name = literal(tool["function"]["name"])
            lines.append(f"call_{index}: {name} {args} {arguments_rule(tool)}")
        more = f"({opening} call)*" if parallel else ""
        return CallSyntax("\n".join(lines), opening, "call", more)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        if self.has_args_marker:
            return "".join(f"{CALLS}{name}{ARGS}{arguments}" for name, arguments in calls)
        objects = [call_object(*call, "arguments") for call in calls]
        return f"{CALLS}[{', '.join(objects)}]"

    def new_call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def template_call_id(self, call_id: str) -> str:
        if _ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _named_call(source: Source, calls: CallReader) -> Steps[None]:
    name = yield from source.word(calls.max_name_chars)
    if name not in calls.names:
        raise NotACall
    if (yield from source.starts_with(CALL_ID)):
        source.take(len(CALL_ID))
        yield from source.word(_MAX_ID_CHARS)
    if (yield from source.starts_with(ARGS)):
        source.take(len(ARGS))
    if (yield from source.skip_space()) != "{":
        raise NotACall
    calls.begin(name)
    yield from calls.stream()


FENCE = "```"
# Pattern for free text that is not a call. It must not start with "{" or "[{".
_TEXT = r"/([ \n]*([^ \n{\[]|\[[^{])(.|\n)*)?/"


@dataclass(frozen=True)
class GenericJsonFormat(ToolFormat):
    name = "json"
    markers = ()

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        try:
            yield from _answer(source, calls)
        except NotACall:
            calls.give_up()
        yield from source.rest()

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        several = '| "[" call (", " call)* "]"' if parallel else ""
        return CallSyntax(
            rules=f"calls: call {several}\n{object_calls(tools, 'arguments')}",
            opening=None,
            first="calls",
            more="",
            bare_text=_TEXT,
        )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        objects = [call_object(*call, "arguments") for call in calls]
        return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _answer(source: Source, calls: CallReader) -> Steps[None]:
    yield from source.skip_space()
    is_fenced = yield from source.starts_with(FENCE)
    if is_fenced:
        source.take(len(FENCE))
        yield from source.word(len("json"))
    opening = yield from source.skip_space()
    if opening == "[":
        yield from calls.read_list()
    elif opening == "{":
        yield from calls.read_series()
    else:
        raise NotACall
    yield from source.skip_space()
    if is_fenced and (yield from source.starts_with(FENCE)):
        source.take(len(FENCE))
        source.discard()
        yield from source.skip_space()


# Markers in templates of families whose calls are not JSON. Their formats are not supported.
_FOREIGN = ("<function=", "<arg_key>", "<parameter=")
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")
# A JSON call with a name and arguments that the template shows as an example to the model. Its
# quotes may be escaped.
_SHOWN_CALL = re.compile(r"name[\\\"']+ ?:.{0,200}?arguments[\\\"']+ ?:", re.DOTALL)


def tool_format(template: str | None) -> ToolFormat:
    source = template or ""
    has_system = not source or "system" in source
    uses_tools = any(_TOOLS.search(code) for code in _CODE.findall(source))
    if any(mark in source for mark in _FOREIGN):
        return GenericJsonFormat(False, has_system)
    if "[TOOL_CALLS]" in source:
        return MistralFormat(uses_tools, has_system, has_args_marker="[ARGS]" in source)
    if "<tool_call>" in source:
        return HermesFormat(uses_tools, has_system)
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and uses_tools):
        return Llama3Format(uses_tools, has_system)
    return GenericJsonFormat(uses_tools and bool(_SHOWN_CALL.search(source)), has_system)
