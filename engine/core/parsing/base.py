"""What a model family is to the rest of the engine: how it writes tool calls, what a parser reads
and what a grammar forces. Each family is one small class beside this file.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.calls import CallReader
from engine.core.parsing.grammars import CallSyntax, answer_grammar, tool_grammar
from engine.core.parsing.source import Source, Steps

Tool = Mapping[str, Any]
_NO_CONTROL: Mapping[str, int] = {}


@dataclass(frozen=True)
class ToolFormat(ABC):
    """`native`: the template renders tools and calls itself. `has_system`: it takes a system
    message. `control` below is the vocabulary's control tokens, text to id.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]  # texts that must be seen where they are control tokens
    one_call_per_message: ClassVar[bool] = False  # as its template demands of the conversation
    native: bool
    has_system: bool = True

    @abstractmethod
    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        """Read all there is, calls and text."""

    @abstractmethod
    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        """How calls of these tools are written, as grammar rules."""

    @abstractmethod
    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model would write them, from names and JSON arguments."""

    def new_call_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def template_call_id(self, call_id: str) -> str:
        """An id from a client, as the template takes it."""
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
        """What an answer must match; None if nothing.

        `answer` is a grammar for an answer that calls no tool. `may_think`: the grammar will stand
        behind an optional block of reasoning, which its free text must not be mistaken for.
        Where nothing marks a call, an answer of `answer` can't be told from one: that is refused.
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
