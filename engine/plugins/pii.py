"""Redacts personal data in prompts and answers, as far as patterns can find it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.interfaces.plugin import (
    Edit,
    Filtered,
    InferencePlugin,
    PluginRequest,
    TextFilter,
)
from engine.plugins.pii_patterns import KINDS, PiiKind, find, open_end

# Patterns look at this many characters before a match. So this many characters at the end of final
# text are kept for the next call.
_CONTEXT = 2


class PiiOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kinds: tuple[str, ...] = tuple(KINDS)
    prompts: bool = True
    answers: bool = True


class PiiRedactor(InferencePlugin):
    """Replaces e-mail addresses, phone, card and account numbers and similar data by labels."""

    name = "pii_redactor"
    version = "1.0"
    on_failure = "refuse"

    def __init__(self) -> None:
        self._options = PiiOptions()
        self._kinds: list[PiiKind] = list(KINDS.values())

    async def initialize(self, config: Mapping[str, Any]) -> None:
        try:
            self._options = msgspec.convert(dict(config), PiiOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        for name in self._options.kinds:
            if name not in KINDS:
                raise ConfigError(f"kinds: there is no '{name}'; known are {', '.join(KINDS)}")
        # If two kinds match at the same place, the first in the order of KINDS is used.
        self._kinds = [kind for name, kind in KINDS.items() if name in self._options.kinds]

    async def pre_inference(self, request: PluginRequest) -> PluginRequest | None:
        if not self._options.prompts:
            return None
        texts = [*request.inputs, *(() if request.prompt is None else (request.prompt,))]
        if any(not isinstance(each, str) for each in texts):
            raise InvalidRequestError(
                "This server takes personal data out of prompts, so it takes them as text and not"
                " as token ids.",
                param="input" if request.inputs else "prompt",
            )
        changed = msgspec.structs.replace(
            request,
            messages=tuple(self._message(each) for each in request.messages),
            prompt=self._value(request.prompt),
            suffix=self._value(request.suffix),
            inputs=self._value(request.inputs),
        )
        return None if changed == request else changed

    def text_filter(self, request: PluginRequest) -> TextFilter | None:
        return Redaction(self._kinds) if self._options.answers else None

    def redact(self, text: str) -> str:
        pieces: list[str] = []
        position = 0
        for found in find(text, 0, self._kinds):
            pieces += (text[position : found.start], found.label)
            position = found.end
        return "".join(pieces) + text[position:]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        changed = dict(message)
        for key in ("content", "reasoning_content"):
            if isinstance(message.get(key), str):
                changed[key] = self.redact(message[key])
        if "tool_calls" in message:
            changed["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return changed

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = self._value(function["arguments"])
        return call | {"function": function | {"arguments": arguments}}

    def _value(self, value: Any) -> Any:
        """Redact all strings in a JSON value. A number that looks like personal data, such as a
        card number, is replaced by a string.
        """
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, Mapping):
            return {self.redact(key): self._value(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return type(value)(self._value(each) for each in value)  # type: ignore[call-arg]
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = self.redact(str(value))
            return value if text == str(value) else text
        return value


class Redaction:
    """A text filter that redacts one text as it is generated. It holds back only text that may be
    the start of a match.
    """

    def __init__(self, kinds: list[PiiKind]) -> None:
        self._kinds = kinds
        self._before = ""

    def __call__(self, pending: str, is_last: bool) -> Filtered:
        text = self._before + pending
        offset = len(self._before)
        final = len(text) if is_last else max(open_end(text), offset)
        edits: list[Edit] = []
        for found in find(text, offset, self._kinds):
            if found.start >= final:
                break
            edits.append(Edit(found.start - offset, found.end - offset, found.label))
            final = max(final, found.end)
        self._before = text[:final][-_CONTEXT:]
        return Filtered(final - offset, edits)
