"""The plugin interface: what a plugin can override, and what it sees of requests and answers.

A plugin gets copies. It never sees keys, headers or other requests. The tenant's name only tells
apart requests of different keys. Hooks run in the plugin's own thread, under a time limit
(docs/plugins.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from engine.core.errors import ForbiddenError
from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.request import SamplingParams

OnFailure = Literal["pass", "refuse"]


class RefusedError(ForbiddenError):
    """A plugin refuses a request or an answer: HTTP 403. The client sees the message."""

    code = "REFUSED_BY_PLUGIN"


class PluginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as earlier plugins have left it. Change it with `msgspec.structs.replace`; the
    first four fields can't be changed.
    """

    request_id: str
    kind: Literal["chat", "completion", "embedding"]
    model: str
    tenant: str  # equal for all requests of a key; empty without keys
    messages: tuple[dict[str, Any], ...] = ()  # chat messages, as in `ChatRequest.messages`
    tools: tuple[dict[str, Any], ...] = ()  # chat tools
    prompt: str | tuple[int, ...] | None = None  # completion prompt: text or token ids
    suffix: str | None = None  # completion suffix
    inputs: tuple[str | tuple[int, ...], ...] = ()  # embedding inputs: texts or token ids
    params: SamplingParams | None = None  # None for an embedding


class PluginChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer. Tool calls are `{"id", "name", "arguments": JSON text}`."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, str], ...] = ()
    finish_reason: str | None = None  # None if it was cut short


class PluginResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, complete or partial. `request` is what the model received."""

    request: PluginRequest
    choices: tuple[PluginChoice, ...] = ()  # none for an embedding
    usage: UsageEvent | None = None  # None if the answer was cut short
    error: str | None = None  # error code, if an error ended it
    elapsed_s: float = 0.0


class Edit(NamedTuple):
    """Replaces characters `start` to `end` by `text`."""

    start: int
    end: int
    text: str


class Filtered(NamedTuple):
    """The first `settled` characters are final, after applying `edits`, which lie in them, in
    order.
    """

    settled: int
    edits: Sequence[Edit] = ()


class TextFilter(Protocol):
    """Filters one text of an answer. Text that it does not settle is passed again, with more
    text.
    """

    def __call__(self, pending: str, is_last: bool) -> Filtered: ...


class InferencePlugin:
    """Override the hooks that you need; others cost nothing.

    `on_failure` decides what happens when a hook raises or times out: the request continues without
    the plugin ("pass"), or is refused ("refuse"). A plugin that withholds content must choose
    "refuse". `rewrites_response`: `post_inference` may return a changed answer, so the stream is
    held back until it is complete. Otherwise the hook only observes, and no client waits for it.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    on_failure: ClassVar[OnFailure] = "pass"
    rewrites_response: ClassVar[bool] = False

    async def initialize(self, config: Mapping[str, Any]) -> None:
        """Called once, before the first request. `config` has the plugin's own options. Raise
        `ConfigError` for an invalid option.
        """

    async def pre_inference(self, request: PluginRequest) -> PluginRequest | None:
        """Called before the model. Returns a changed request, or None to keep it. Raises
        `RefusedError`, or another `EngineError` with a 4xx status, to refuse it.
        """
        return None

    async def post_inference(self, response: PluginResponse) -> PluginResponse | None:
        """Called after the answer. Its result is used only if the plugin `rewrites_response`."""
        return None

    def text_filter(self, request: PluginRequest) -> TextFilter | None:
        """A new filter for one text of the answer to `request`, or None to leave the text as it is.

        Each choice's text, its reasoning, and every string in a tool call's arguments is a separate
        text.
        """
        return None

    async def close(self) -> None:
        """Called once, when the server stops."""
