"""The typed events and requests of an `InferenceBackend`: text in, text out.

The server formats these into JSON or SSE in one place; external servers' streams are parsed into
them too. A stream is any number of text, reasoning and tool call events, one `FinishEvent` per
choice, then exactly one `UsageEvent`; a failure is an `EngineError` raised from the iterator
instead of the rest.
"""

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engine.core.interfaces.request import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    token_bytes: bytes
    logprob: float


class TokenText(msgspec.Struct, frozen=True):
    """One generated token with its log-probability, as clients are shown it."""

    token: str
    token_bytes: bytes
    logprob: float  # NaN: a prompt's first token, which nothing comes before
    top: tuple[TopLogprob, ...] = ()


class TextEvent(msgspec.Struct, frozen=True):
    """Text that became final. It counts all tokens of its step: `num_tokens` may be positive while
    `text` is empty (half a character, or tokens whose text is reasoning or a tool call).
    """

    choice: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenText, ...] | None = None
    token_ids: tuple[int, ...] = ()  # where the backend knows them


class ReasoningEvent(msgspec.Struct, frozen=True):
    """Text of the model's reasoning, before its answer."""

    choice: int
    text: str


class ToolCallEvent(msgspec.Struct, frozen=True):
    """A piece of a call. The first one of an `index` has `call_id` and `name`, no other has; the
    pieces of `arguments` join to a JSON object.
    """

    choice: int
    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


class FinishEvent(msgspec.Struct, frozen=True):
    choice: int
    reason: Literal["stop", "length", "tool_calls"]
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
    reasoning_tokens: int = 0  # of completion_tokens


Event = TextEvent | ReasoningEvent | ToolCallEvent | FinishEvent | UsageEvent


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must match. `source` is a JSON schema or list of choices as JSON text, a
    regular expression, or a Lark grammar; `param` is the client's name for it, for errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    source: str = ""
    param: str = "response_format"


class GenerationContext(msgspec.Struct, frozen=True, kw_only=True):
    """What travels with a request besides its text."""

    request_id: str
    params: SamplingParams
    model: str = ""  # a card's id; a backend of one model need not look
    session: str = ""  # the same for requests that belong together, where the client tells
    priority: int = 0
    salt: str = ""
    tenant: str = ""  # whose request it is, and whose share it takes; a salt may be narrower
    timeout_s: float | None = None
    queue_timeout_s: float | None = None  # None: as long as `timeout_s`
    grammar: GrammarSpec | None = None
    truncate_prompt_tokens: int | None = None  # keep only so many, the last ones; -1: what fits


class ToolChoice(msgspec.Struct, frozen=True):
    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None  # of the one tool, when named


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, validated at the edge.

    Messages are plain dicts: `role` (system, user, assistant or tool) and `content`, a string. An
    assistant's may have `reasoning_content` and `tool_calls`, each `{"id", "type": "function",
    "function": {"name", "arguments": object}}`; a tool's has `tool_call_id` and maybe `name`. Tools
    are `{"type": "function", "function": {"name", "description", "parameters"}}`.
    """

    context: GenerationContext
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = {}  # names are checked against the template's allow-list
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is the assistant's, and unfinished


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as text or as token ids."""

    context: GenerationContext
    prompt: str | tuple[int, ...]
    suffix: str | None = None  # the text after what is to be written; needs such a model
    # First event: the prompt's text, with its logprobs if `score_prompt` is set; no tokens counted.
    echo: bool = False


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, or token ids, of which each becomes one vector."""

    request_id: str
    model: str = ""  # as in a `GenerationContext`
    inputs: tuple[str | tuple[int, ...], ...]
    priority: int = 0
    salt: str = ""
    tenant: str = ""  # whose share of the backend it takes
    timeout_s: float | None = None
    queue_timeout_s: float | None = None  # as in a `GenerationContext`
    truncate_prompt_tokens: int | None = None


class Embeddings(msgspec.Struct, frozen=True):
    """One row of unit length for each input."""

    vectors: "NDArray[np.float32]"  # (inputs, dimensions)
    prompt_tokens: int


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
    # Of: completions chat embeddings score tools json_schema reasoning suffix
    capabilities: tuple[str, ...] = ()
    # Capabilities that the model was not made for, and parameters that its backend works around.
    emulated: tuple[str, ...] = ()
    # Fields of a request's parameters that its backend can't honour, and `priority` if it has none.
    lacks: tuple[str, ...] = ()
    template_options: tuple[str, ...] = ()  # what `ChatRequest.template_options` can change
    trained_context: int | None = None  # tokens; may exceed what is served
    num_dimensions: int | None = None  # of its embeddings
    root: str | None = None  # the id of the model that this is another name for


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's own view of itself; `ready` decides whether requests are taken."""

    ready: bool
    detail: str
    step_age_s: float | None = None  # since the last step while work is pending; None when idle
    num_restarts: int = 0  # of the engine behind it
    loaded: bool = True  # False: ready all the same, for a request loads it
