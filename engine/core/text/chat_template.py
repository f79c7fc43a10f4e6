"""Renders conversations to prompts with the model's own chat template.

A client's text can never become a control token. Before rendering, every control token in the
client's strings is replaced by a private-use Unicode character that occurs nowhere else. So every
control token in the rendered text comes from the template, and is converted to its id. Then the
client's texts are put back as plain text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.core.errors import InvalidRequestError
from engine.core.text.tokenizer import RenderedPrompt, SpecialTokens

if TYPE_CHECKING:
    from engine.core.text.template_sandbox import TemplateProgram

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Template variables that a client may set. This set must not contain variables that `render` sets.
OPTIONS = frozenset(
    {
        *("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "documents"),
        *("date_string", "builtin_tools", "custom_tools", "tools_in_user_message"),
        *("thinking_mode", "thinking_budget", "thinking_effort", "reasoning_strength"),
        *("clear_thinking", "preserved_thinking", "keep_past_thinking", "model_identity"),
    }
)

_MAX_DEPTH = 64
PART_CHARS = 100_000  # translated at a time, because translating holds the GIL
_CODE_START = re.compile(r"\{[{%]")
_CODE_END = re.compile(r"[%}]\}")


def template_options(source: str) -> tuple[str, ...]:
    """The names in `OPTIONS` that occur in the source of a template."""
    return tuple(sorted(OPTIONS & set(re.findall(r"\w+", source))))


def code_words(source: str) -> set[str]:
    """The words in the code of a template. The time is linear in the length of the source."""
    words: set[str] = set()
    end = 0
    while start := _CODE_START.search(source, end):
        closing = _CODE_END.search(source, start.end())
        if closing is None:
            break
        end = closing.end()
        words.update(re.findall(r"\w+", source[start.end() : closing.start()]))
    return words


def takes_functions(source: str) -> bool:
    """Whether the template reads tools from the variable `functions` instead of `tools`."""
    words = code_words(source)
    return "functions" in words and "tools" not in words


class ChatTemplate:
    """A model's chat template, compiled on first use. `source` is None if the model has none."""

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        self._has_source = source is not None
        self._source = source or ""
        self._tokens = {"bos_token": bos, "eos_token": eos}
        # Older templates read the tools as JSON text, from a variable of another name.
        self._takes_functions = takes_functions(self._source)
        self.options = template_options(self._source)

    def mentions(self, word: str) -> bool:
        return word in self._source

    def check(self) -> None:
        """Raise a `ModelFormatError` if the template does not compile."""
        _ = self._program

    @cached_property
    def _program(self) -> "TemplateProgram | None":
        if not self._has_source:
            return None
        # Imported late, because jinja2 is slow to import and completions don't need it.
        from engine.core.text.template_sandbox import TemplateProgram

        return TemplateProgram(self._source)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render trusted messages to text, without a generation prompt. Control tokens in the
        messages are not hidden.
        """
        assert self._program is not None, "the model has no chat template"
        given = {"messages": messages, "tools": tools, "add_generation_prompt": False}
        return self._program.render({**given, **self._variables(tools)})

    def _variables(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Variables that every rendering has."""
        variables: dict[str, Any] = dict(self._tokens)
        if self._takes_functions:
            functions = [tool["function"] for tool in tools or ()]
            variables["functions"] = json.dumps(functions, indent=4, ensure_ascii=False)
            variables["datetime"] = datetime.now().strftime("%b %d %Y %H:%M:%S")
        return variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        specials: SpecialTokens,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> RenderedPrompt:
        if self._program is None:
            raise InvalidRequestError(
                "This model has no chat template, so it cannot hold a conversation; send the whole "
                "prompt as text to /v1/completions.",
                param="messages",
            )
        _check(messages, options)
        given = {"messages": messages, "tools": tools, **options}
        strings = list(_strings(given))
        found = (match for text in strings for match in specials.pattern.finditer(text))
        smuggled = {match.group() for match in found}
        fixed = {**self._variables(tools), "add_generation_prompt": add_generation_prompt}
        segments = self._segments(self._program, given, fixed, specials, smuggled)
        if any(edge in text for text in strings for edge in specials.edges):
            # The client's text may contain only a part of a control token, and text of the template
            # around it may contain the rest. Hiding the first and last characters of control tokens
            # prevents the parts from joining.
            hidden = smuggled | specials.edges
            apart = self._segments(self._program, given, fixed, specials, hidden)
            if _controls(apart) != _controls(segments):
                segments = apart
        return RenderedPrompt(segments)

    def _segments(
        self,
        program: "TemplateProgram",
        given: Mapping[str, Any],
        fixed: Mapping[str, Any],
        specials: SpecialTokens,
        hidden: Iterable[str],
    ) -> tuple[str | int, ...]:
        disguise = _Disguise(hidden, [self._source, *_strings(given)])
        rendered = program.render({**disguise.put_on(given), **fixed})
        segments: list[str | int] = []
        end = 0
        for match in specials.pattern.finditer(rendered):
            segments += [
                disguise.take_off(rendered[end : match.start()]),
                specials.ids[match.group()],
            ]
            end = match.end()
        segments.append(disguise.take_off(rendered[end:]))
        return tuple(segment for segment in segments if segment != "")


class _Disguise:
    """Replaces the texts in `hidden` by private-use Unicode characters that don't occur in
    `around`, and puts them back later.
    """

    def __init__(self, hidden: Iterable[str], around: Iterable[str]) -> None:
        longest_first = sorted(hidden, key=lambda text: (-len(text), text))
        taken = set().union(*around) if longest_first else set()
        free = (chr(point) for point in range(0xF0000, 0x10FFFE) if chr(point) not in taken)
        self._mask = dict(zip(longest_first, free, strict=False))
        if len(self._mask) < len(longest_first):
            raise InvalidRequestError("The messages use every private-use character of Unicode.")
        self._texts = {ord(mask): text for text, mask in self._mask.items()}
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def put_on(self, value: Any) -> Any:
        if not self._mask:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._mask[match.group()], value)
        if isinstance(value, Mapping):
            # Roles are not replaced. They have been validated, and templates build control tokens
            # from them.
            return {
                self.put_on(key): item if key == "role" else self.put_on(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.put_on(item) for item in value]
        return value

    def take_off(self, text: str) -> str:
        if not self._texts:
            return text
        parts = range(0, len(text), PART_CHARS)
        return "".join(text[at : at + PART_CHARS].translate(self._texts) for at in parts)


def _check(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise InvalidRequestError(
            f"The template option {unknown[0]!r} is not available; there are "
            f"{', '.join(sorted(OPTIONS))}.",
            param="chat_template_kwargs",
        )
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise InvalidRequestError(
                f"messages[{index}].role must be one of {', '.join(sorted(ROLES))}.",
                param=f"messages[{index}].role",
            )


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"Messages and tools may nest {_MAX_DEPTH} levels deep.")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key, depth + 1)
            yield from _strings(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item, depth + 1)


def _controls(segments: Sequence[str | int]) -> list[int]:
    return [segment for segment in segments if isinstance(segment, int)]
