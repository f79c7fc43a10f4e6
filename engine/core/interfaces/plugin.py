"""What a plugin is, and what it is shown: one request, one answer, one text as it arrives.

A plugin sees copies. It never sees keys, headers or other requests; of the tenant it gets a name
that tells requests of one key from those of another and nothing else. Its hooks run in a thread of
the plugin's own, under a time limit (docs/plugins.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from engine.core.errors import ForbiddenError
from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.request import SamplingParams

OnFailure = Literal["pass", "refuse"]


class RefusedError(ForbiddenError):
    """A plugin does not let a request or an answer pass: HTTP 403. The client reads the message."""

    code = "REFUSED_BY_PLUGIN"


class PluginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the plugins before have left it. Change one with `msgspec.structs.replace`; the
    first four fields stay as they are.
    """

    request_id: str
    kind: Literal["chat", "completion", "embedding"]
    model: str
    tenant: str  # the same for all requests of a key; empty where no key is configured
    messages: tuple[dict[str, Any], ...] = ()  # of a chat, in the form of `ChatRequest.messages`
    tools: tuple[dict[str, Any], ...] = ()  # of a chat
    prompt: str | tuple[int, ...] | None = None  # of a completion: text, or token ids
    suffix: str | None = None  # of a completion
    inputs: tuple[str | tuple[int, ...], ...] = ()  # of an embedding: texts, or token ids
    params: SamplingParams | None = None  # None for an embedding


class PluginChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer. Tool calls are `{"id", "name", "arguments": JSON text}`."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, str], ...] = ()
    finish_reason: str | None = None  # None: it was cut short


class PluginResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, complete or as far as it came. `request` is what the model was asked."""

    request: PluginRequest
    choices: tuple[PluginChoice, ...] = ()  # none for an embedding
    usage: UsageEvent | None = None  # None: it was cut short
    error: str | None = None  # the code of the error that ended it
    elapsed_s: float = 0.0


class Edit(NamedTuple):
    """Characters `start` to `end` become `text`."""

    start: int
    end: int
    text: str


class Filtered(NamedTuple):
    """The first `settled` characters are final but for `edits`, which are in order and within."""

    settled: int
    edits: Sequence[Edit] = ()


class TextFilter(Protocol):
    """Follows one text of an answer. What it does not settle it is given again, with more."""

    def __call__(self, pending: str, is_last: bool) -> Filtered: ...


class InferencePlugin:
    """Override the hooks that are needed: one that is not overridden costs nothing.

    `on_failure` says what happens to a request when a hook raises or is late: it goes on without
    the plugin ("pass"), or is refused ("refuse"), which is what anything must choose that keeps
    something back. `rewrites_response`: `post_inference` may return a changed answer, for which
    the stream is kept back until it is complete; else it only looks on, and nobody waits for it.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    on_failure: ClassVar[OnFailure] = "pass"
    rewrites_response: ClassVar[bool] = False

    async def initialize(self, config: Mapping[str, Any]) -> None:
        """Once, before the first request; `config` is the plugin's own keys of its table. Raise
        `ConfigError` for an option that can't be used.
        """

    async def pre_inference(self, request: PluginRequest) -> PluginRequest | None:
        """Before the model. Returns a changed request, or None to leave it. Raises `RefusedError`,
        or another `EngineError` with a 4xx status, to refuse it.
        """
        return None

    async def post_inference(self, response: PluginResponse) -> PluginResponse | None:
        """After the answer. What it returns counts only if the plugin `rewrites_response`."""
        return None

    def text_filter(self, request: PluginRequest) -> TextFilter | None:
        """A new filter for one text of the answer to `request`; None: it is left as it is.

        Each choice's text, its reasoning and every string in the arguments of a tool call is a text
        of its own.
        """
        return None

    async def close(self) -> None:
        """Once, when the server stops."""
