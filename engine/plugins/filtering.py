"""Passes an answer's events through one plugin's text filter.

The text, the reasoning and each tool call of a choice are filtered separately. When another kind of
output starts or the choice ends, the filter must release the text that it holds back. In the JSON
arguments of a tool call, each decoded string is filtered as a text. So arguments are filtered and
sent only when they are complete.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
)
from engine.core.interfaces.plugin import Filtered, PluginRequest, TextFilter
from engine.plugins.channel import FilteredText, PlacedToken, hidden, mistake_in
from engine.plugins.host import PluginFailedError, PluginHost

Placed = tuple[Event, list[PlacedToken]]  # an event, and the tokens of its text
MAX_JSON_DEPTH = 64


def _unchanged(pending: str, is_last: bool) -> Filtered:
    return Filtered(len(pending))


class FilterStage:
    """Filters one answer with one plugin. `push` takes an event and returns the events that may now
    be passed on.
    """

    def __init__(self, host: PluginHost, request: PluginRequest) -> None:
        self._host = host
        self._request = request
        self._texts: dict[int, FilteredText] = {}
        self._reasoning: dict[int, FilteredText] = {}
        # choice -> its incomplete tool call: the index, and the pieces of the arguments
        self._calls: dict[int, tuple[int, list[str]]] = {}

    async def push(self, event: Event, tokens: list[PlacedToken]) -> list[Placed]:
        if isinstance(event, TextEvent):
            before = await self._end_others(event.choice) if event.text else []
            return [*before, await self._push_text(event, tokens)]
        if isinstance(event, ReasoningEvent):
            channel = await self._channel(self._reasoning, event.choice)
            channel.add(event.text, ())
            text, _ = await self._run(channel, is_last=False)
            return [(ReasoningEvent(event.choice, text), [])] if text else []
        if isinstance(event, ToolCallEvent):
            return await self._push_call(event)
        if isinstance(event, FinishEvent):
            return [*await self._end(event.choice), (event, [])]
        return [(event, tokens)]

    async def _push_text(self, event: TextEvent, tokens: list[PlacedToken]) -> Placed:
        channel = await self._channel(self._texts, event.choice)
        channel.add(event.text, tokens)
        if not (event.text or tokens):
            return TextEvent(event.choice, "", event.num_tokens), []
        text, settled = await self._run(channel, is_last=False)
        return TextEvent(event.choice, text, event.num_tokens), settled

    async def _push_call(self, event: ToolCallEvent) -> list[Placed]:
        made: list[Placed] = []
        index, pieces = self._calls.get(event.choice, (-1, []))
        if index != event.index:
            made = await self._end(event.choice)
            index, pieces = event.index, []
            self._calls[event.choice] = (index, pieces)
            made.append((ToolCallEvent(event.choice, index, "", event.call_id, event.name), []))
        pieces.append(event.arguments)
        return made

    async def _end_others(self, choice: int) -> list[Placed]:
        """Release held-back reasoning and complete the open tool call, because text follows."""
        return [*await self._end_reasoning(choice), *await self._end_call(choice)]

    async def _end(self, choice: int) -> list[Placed]:
        made = await self._end_reasoning(choice)
        channel = self._texts.pop(choice, None)
        if channel is not None:
            text, tokens = await self._run(channel, is_last=True)
            if text or tokens:
                made.append((TextEvent(choice, text, 0), tokens))
        return [*made, *await self._end_call(choice)]

    async def _end_reasoning(self, choice: int) -> list[Placed]:
        channel = self._reasoning.pop(choice, None)
        if channel is None:
            return []
        text, _ = await self._run(channel, is_last=True)
        return [(ReasoningEvent(choice, text), [])] if text else []

    async def _end_call(self, choice: int) -> list[Placed]:
        if choice not in self._calls:
            return []
        index, pieces = self._calls.pop(choice)
        arguments = "".join(pieces)
        try:
            arguments = await self._host.call(
                "filter", _filtered_arguments, self._new_filter, arguments
            )
        except EngineError as error:
            self._bear(error)
        return [(ToolCallEvent(choice, index, arguments), [])] if arguments else []

    async def _channel(self, channels: dict[int, FilteredText], choice: int) -> FilteredText:
        if choice not in channels:
            made: TextFilter | None = None
            try:
                made = await self._host.call("text_filter", self._new_filter)
            except EngineError as error:
                self._bear(error)
            channels[choice] = FilteredText(made or _unchanged)
        return channels[choice]

    async def _run(self, channel: FilteredText, is_last: bool) -> tuple[str, list[PlacedToken]]:
        if channel.text_filter is _unchanged:
            return channel.settle(_unchanged(channel.pending, is_last), is_last)
        pending = channel.pending
        try:
            made = await self._host.call(
                "filter",
                channel.text_filter,
                pending,
                is_last,
                mistake_in=lambda made: mistake_in(made, len(pending), is_last),
            )
        except EngineError as error:
            self._bear(error)
            # The filter may have missed some text, so the rest of the text is not filtered.
            channel.text_filter = _unchanged
            return channel.release()
        return channel.settle(made, is_last)

    def _new_filter(self) -> TextFilter | None:
        return self._host.plugin.text_filter(self._request)

    def _bear(self, error: EngineError) -> None:
        """Raise `error` if it must end the answer: if the plugin refuses the request, or if it
        failed and its `on_failure` is "refuse". Otherwise ignore the error.
        """
        if not isinstance(error, PluginFailedError) or self._host.on_failure == "refuse":
            raise error


def shown(event: Event, tokens: Sequence[PlacedToken]) -> Event:
    """The event as the client gets it. Tokens whose place in the text is unknown show no text."""
    if not isinstance(event, TextEvent) or not tokens:
        return event
    known = tuple(
        token.shown if token.start is not None else hidden(token.shown) for token in tokens
    )
    return TextEvent(event.choice, event.text, event.num_tokens, known)


def _filtered_arguments(new_filter: Callable[[], TextFilter | None], arguments: str) -> str:
    """Filter the arguments of a tool call. Called in the plugin's thread. Arguments that are not
    valid JSON are filtered as one text.
    """

    def filtered(text: str) -> str:
        text_filter = new_filter()
        if text_filter is None:
            return text
        made = text_filter(text, True)
        mistake = mistake_in(made, len(text), True)
        if mistake is not None:
            raise ValueError(mistake)
        channel = FilteredText(text_filter)
        channel.add(text, ())
        return channel.settle(made, True)[0]

    try:
        value = json.loads(arguments)
        is_deep = _depth_exceeds(value, MAX_JSON_DEPTH)
    except (ValueError, RecursionError):
        return filtered(arguments)
    if is_deep:
        return filtered(arguments)
    changed = _mapped(value, filtered)
    return arguments if changed == value else json.dumps(changed, ensure_ascii=False)


def _depth_exceeds(value: Any, limit: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_depth_exceeds(each, limit - 1) for each in parts)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = json.dumps(value)
        changed = change(text)
        return value if changed == text else changed
    return value
