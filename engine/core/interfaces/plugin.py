"""The plugin interface: the base class with the hooks, and the types of requests and answers that
the hooks get.

A plugin gets copies of requests and answers. It never sees API keys or HTTP headers. A request's
`tenant` names the owner of the API key, but the plugin does not learn the key. Hooks run in the
plugin's own thread, under a time limit (docs/plugins.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from engine.core.errors import ForbiddenError
from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.request import SamplingParams

OnFailure = Literal["pass", "refuse"]


class RefusedError(ForbiddenError):
    """Raised by a plugin to refuse a request or an answer: HTTP 403. The client sees the
    message.
    """

    code = "REFUSED_BY_PLUGIN"


class PluginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, with the changes that earlier plugins made. To change the request, a hook returns
    a copy made with `msgspec.structs.replace`. The first four fields must stay as they are.
    """

    request_id: str
    kind: Literal["chat", "completion", "embedding"]
    model: str
    tenant: str  # the same for all requests with one API key; empty if the server has no keys
    messages: tuple[dict[str, Any], ...] = ()  # chat messages, as in `ChatRequest.messages`
    tools: tuple[dict[str, Any], ...] = ()  # chat tools
    prompt: str | tuple[int, ...] | None = None  # completion prompt: text or token ids
    suffix: str | None = None  # completion suffix
    # Embedding inputs: texts or token ids. Of a reranker: the texts of all pairs, in order.
    inputs: tuple[str | tuple[int, ...], ...] = ()
    params: SamplingParams | None = None  # None for an embedding


class PluginChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer. Tool calls are `{"id", "name", "arguments": JSON text}`."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, str], ...] = ()
    finish_reason: str | None = None  # None if the choice did not finish


class PluginResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, complete or partial. `request` is the request after all plugins changed it."""

    request: PluginRequest
    choices: tuple[PluginChoice, ...] = ()  # none for an embedding
    usage: UsageEvent | None = None  # None if the answer did not finish
    error: str | None = None  # error code, if an error ended the answer
    elapsed_s: float = 0.0


class Edit(NamedTuple):
    """Replaces the characters from `start` up to, but not including, `end` by `text`."""

    start: int
    end: int
    text: str


class Filtered(NamedTuple):
    """The result of a `TextFilter`. The first `settled` characters of the pending text become
    final, after `edits` are applied to them. The edits are sorted and lie within these characters.
    """

    settled: int
    edits: Sequence[Edit] = ()


class TextFilter(Protocol):
    """Filters one text of an answer as it is generated. Each call gets the pending text. Text after
    the first `settled` characters stays pending and is passed again, with more text appended.
    """

    def __call__(self, pending: str, is_last: bool) -> Filtered: ...


class InferencePlugin:
    """Base class of plugins. Override the hooks that you need. Hooks that are not overridden cost
    nothing.

    `on_failure` decides what happens when a hook raises or times out: the request continues without
    the plugin ("pass"), or is refused ("refuse"). A plugin that withholds content must choose
    "refuse". If `rewrites_response` is true, `post_inference` may return a changed answer, so the
    server sends nothing until the answer is complete. If it is false, the hook's result is ignored
    and clients don't wait for the hook.
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
        """Called before the model runs. Return a changed request, or None to leave the request as
        it is. To refuse it, raise `RefusedError` or another `EngineError` with a 4xx status.
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
