"""The typed events and requests of an `InferenceBackend`: text in, text out.

The server formats these into JSON or SSE in one place; external servers' streams are parsed into
them too. A stream is any number of `TextEvent`s, one `FinishEvent` per choice, then exactly one
`UsageEvent`; a failure is an `EngineError` raised from the iterator instead of the rest.
"""

from typing import Any, Literal

import msgspec

from engine.core.interfaces.request import SamplingParams


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    token_bytes: bytes
    logprob: float


class TokenText(msgspec.Struct, frozen=True):
    """One generated token with its log-probability, as clients are shown it."""

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class TextEvent(msgspec.Struct, frozen=True):
    """Text that became final. `num_tokens` may be positive while `text` is empty (half a
    character).
    """

    choice: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenText, ...] | None = None
    token_ids: tuple[int, ...] = ()  # where the backend knows them


class FinishEvent(msgspec.Struct, frozen=True):
    choice: int
    reason: Literal["stop", "length"]
    # The stop string or token id that ended the choice; None for end of text or length.
    stop_reason: str | int | None = None


class UsageEvent(msgspec.Struct, frozen=True):
    """The last event of a stream that went well."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    # Seconds: waiting for a first step, prompt, everything after the first token.
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


Event = TextEvent | FinishEvent | UsageEvent


class GenerationContext(msgspec.Struct, frozen=True, kw_only=True):
    """What travels with a request besides its text."""

    request_id: str
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    timeout_s: float | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Messages as plain dicts (`role`, `content` as a string), validated at the edge."""

    context: GenerationContext
    messages: tuple[dict[str, Any], ...]


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as text or as token ids."""

    context: GenerationContext
    prompt: str | tuple[int, ...]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What `/v1/models` tells of a model."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    backend: str
    quantization: str | None = None
    num_params: int | None = None
    size_bytes: int | None = None
    capabilities: tuple[str, ...] = ()


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's own view of itself; `ready` decides whether requests are taken."""

    ready: bool
    detail: str
    step_age_s: float | None = None  # since the last step while work is pending; None when idle
    num_restarts: int = 0  # of the engine behind it
