"""The requests that an `InferenceBackend` takes, and the events that it yields.

The HTTP server converts events to JSON or SSE. Backends for external servers parse those servers'
streams into the same events. A successful stream has any number of text, reasoning and tool call
events, one `FinishEvent` per choice, and last one `UsageEvent`. A failed stream raises an
`EngineError`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engine.core.interfaces.interp import InterpRequest
from engine.core.interfaces.request import RequestNotes, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    token_bytes: bytes
    logprob: float
    token_id: int = -1  # -1: the backend does not know it


class TokenText(msgspec.Struct, frozen=True):
    """One token with its log-probability, as shown to clients."""

    token: str
    token_bytes: bytes
    logprob: float  # NaN for the first token of a prompt, which has no probability
    top: tuple[TopLogprob, ...] = ()
    token_id: int = -1  # -1: the backend does not know it
    in_text: bool = True  # False for a control token that is not part of the text


class PromptProgress(msgspec.Struct, frozen=True):
    """How much of a prompt is computed."""

    total: int  # tokens of the prompt
    cached: int  # tokens that were in the prefix cache
    processed: int  # tokens that are computed or were cached
    seconds: float  # since the first step of the request


class TextEvent(msgspec.Struct, frozen=True):
    """A piece of an answer's text. It is final: later events don't change it.

    `num_tokens` counts all tokens of the generation step. It may be positive while `text` is empty,
    because the tokens may be part of a character, of reasoning or of a tool call.
    """

    choice: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenText, ...] | None = None
    token_ids: tuple[int, ...] = ()  # empty if the backend does not know them
    progress: PromptProgress | None = None  # only in events before the first token, without text


class ReasoningEvent(msgspec.Struct, frozen=True):
    """A piece of the model's reasoning text."""

    choice: int
    text: str


class ToolCallEvent(msgspec.Struct, frozen=True):
    """Part of a tool call. All parts of one call have the same `index`. Only the first part has
    `call_id` and `name`. The concatenated `arguments` of all parts are a JSON object.
    """

    choice: int
    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


class FinishEvent(msgspec.Struct, frozen=True):
    choice: int
    reason: Literal["stop", "length", "tool_calls"]
    # The stop string or stop token id that ended the choice. None if the model ended its text, or
    # if the choice reached its max length.
    stop_reason: str | int | None = None


class UsageEvent(msgspec.Struct, frozen=True):
    """The last event of a successful stream."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float = 0.0  # seconds from submission to the first step
    prefill_s: float = 0.0  # seconds from the first step to the first token
    decode_s: float = 0.0  # seconds from the first token to the end
    reasoning_tokens: int = 0  # included in `completion_tokens`
    num_revivals: int = 0  # how often the request continued in another engine
    num_drafted: int = 0  # tokens that speculation guessed
    num_accepted: int = 0  # those of them that were right
    has_prediction: bool = False  # whether the client said which answer it expects


Event = TextEvent | ReasoningEvent | ToolCallEvent | FinishEvent | UsageEvent


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint that the text of an answer must match. The content of `source` depends on
    `kind`: a JSON schema or a list of choices (both as JSON text), a regular expression, or a
    grammar in Lark or GBNF. `param` is the request parameter that set the constraint; error
    messages name it.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    source: str = ""
    param: str = "response_format"


class GenerationContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in a generation request except its messages or prompt."""

    request_id: str
    params: SamplingParams
    model: str = ""  # the requested model card's id; backends with one model may ignore it
    session: str = ""  # the client's name for a conversation; empty if it sent none
    priority: int = 0
    salt: str = ""  # only requests with the same salt share cached prefixes
    tenant: str = ""  # owner of the request; tenants get equal shares of a busy engine
    timeout_s: float | None = None
    queue_timeout_s: float | None = None  # None: same as `timeout_s`
    grammar: GrammarSpec | None = None
    # Keep only this many tokens of the prompt. -1 keeps as many as fit into the context. None keeps
    # the whole prompt.
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"  # the side that is cut off
    # The answer that the client expects, or a part of it. It may speed up the answer.
    expected: str = ""
    # Called once the backend has checked the prompt and sent it to its engine, with the prompt's
    # token ids. None: only the remote server knows them.
    on_prompt: Callable[[tuple[int, ...] | None], None] | None = None
    # Called whenever more of the prompt is computed. Backends of other servers never call it.
    on_progress: Callable[[PromptProgress], None] | None = None
    # Called with True if the request waits for its turn in a queue of our own engine, and with
    # False when its turn has come. Until then it may still be refused. Backends of other servers
    # never call it.
    on_wait: Callable[[bool], None] | None = None
    # Our own backends write here what happened to the request. None: nobody reads it.
    notes: RequestNotes | None = None
    interp: InterpRequest | None = None  # what the request reads and changes inside the model
    # Called at the end with what the request read: the bytes of a safetensors file.
    on_captured: Callable[[bytes], None] | None = None

    def copied(self, request_id: str, **changes: Any) -> "GenerationContext":
        """The context of a copy of the request. The copy has the edits of the original, but neither
        its callbacks nor its captures.
        """
        interp = None if self.interp is None else self.interp.only_edits()
        silent: dict[str, Any] = dict.fromkeys(LISTENERS)
        return msgspec.structs.replace(
            self, request_id=request_id, interp=interp, **silent | changes
        )


# The fields of a context that report something to the sender of the request.
LISTENERS = ("on_prompt", "on_progress", "on_wait", "notes", "on_captured")


class ToolChoice(msgspec.Struct, frozen=True):
    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None  # the tool's name, in mode "named"


# In the content of a message with images, this character (U+FFFC) marks the place of each image.
IMAGE_MARK = "\ufffc"


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request after validation. If `score_prompt` is set, the first event of each choice has
    the logprobs of the prompt, and no text.

    Messages are plain dicts with `role` (system, user, assistant or tool) and `content`, a string.
    A user message may have `images`, a list of image files (bytes), one for each `IMAGE_MARK` in
    the content. Other messages may have this character as plain text.
    An assistant message may have `reasoning_content` and `tool_calls`, each `{"id", "type":
    "function", "function": {"name", "arguments": object}}`. A tool message has `tool_call_id` and
    maybe `name`. Tools are `{"type": "function", "function": {"name", "description",
    "parameters"}}`.
    """

    context: GenerationContext
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    # Variables for the chat template. Only names in `chat_template.OPTIONS` are accepted.
    template_options: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is an unfinished assistant message


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion request: one prompt, as text or as token ids."""

    context: GenerationContext
    prompt: str | tuple[int, ...]
    suffix: str | None = None  # text after the gap to fill; needs a fill-in-the-middle model
    # Names of control tokens in a text become these tokens. Otherwise they stay text.
    parse_special: bool = False
    add_special_tokens: bool = True  # BOS and EOS, if the model expects them around a text
    # Send the prompt's text as the first event, with logprobs if `score_prompt` is set. The
    # prompt's tokens still don't count as generated in the usage.
    echo: bool = False


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What clients need to know of a model's tokenizer. Tokens that a model lacks are None."""

    vocab_size: int
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    chat_template: str | None
    special_tokens: dict[str, int]  # the control tokens: name -> id


class TextPair(msgspec.Struct, frozen=True):
    """A query and a document, which a reranker compares."""

    first: str
    second: str


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An embedding request. Each input, a text or its token ids, becomes one vector. If the model
    has the capability `rerank`, inputs are pairs, and each becomes a vector of one number: the
    pair's score.
    """

    request_id: str
    model: str = ""  # see `GenerationContext`
    inputs: tuple[str | tuple[int, ...] | TextPair, ...]
    # For each input, the name of the model's prompt to put before it, or None for the default.
    # Empty: the default for all.
    prompt_names: tuple[str | None, ...] = ()
    priority: int = 0
    salt: str = ""
    tenant: str = ""  # owner of the request, for fair sharing
    timeout_s: float | None = None
    queue_timeout_s: float | None = None  # see `GenerationContext`
    truncate_prompt_tokens: int | None = None


class Embeddings(msgspec.Struct, frozen=True):
    """One unit-length vector for each input."""

    vectors: "NDArray[np.float32]"  # (inputs, dimensions)
    prompt_tokens: int


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of a model: the system message of conversations that have none, and sampling
    parameters and options of the chat template by name, for requests that do not set them.
    """

    system: str | None = None
    template_options: dict[str, Any] = {}
    parameters: dict[str, Any] = {}


# Of chats whose model recommends nothing. Small models answer simple questions wrongly at the API's
# temperature of 1 (benchmarks/accuracy/simple_questions.py).
USUAL_SAMPLING = {"temperature": 0.1}


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model's description in `/v1/models`."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    backend: str
    quantization: str | None = None
    num_params: int | None = None
    size_bytes: int | None = None
    # Any of: completions, chat, embeddings, score, rerank, tools, json_schema, reasoning, suffix,
    # images.
    # score: the model compares texts. rerank: it does so by computing pairs, not by embeddings.
    capabilities: tuple[str, ...] = ()
    # Capabilities that the model was not trained for, for example tools that a message describes to
    # it. Also request parameters that the backend emulates.
    emulated: tuple[str, ...] = ()
    # Request parameters that the backend does not support. Includes `priority` if the backend has
    # no priorities.
    lacks: tuple[str, ...] = ()
    template_options: tuple[str, ...] = ()  # accepted keys of `ChatRequest.template_options`
    # Context length of the training, in tokens; may exceed `max_model_len`.
    trained_context: int | None = None
    preset: Preset | None = None  # set by the server, from `[presets.ID]`
    max_sequences: int | None = None  # max number of sequences in one step; None: not known
    num_dimensions: int | None = None  # length of the model's embedding vectors
    prompt_names: tuple[str, ...] = ()  # names of the prompts that embedding inputs may have
    root: str | None = None  # id of the model that this card is an alias of
    parent: str | None = None  # id of the base model, if this is a LoRA adapter
    tenant: str | None = None  # who trained it here and may use it alone; None: everyone may
    cache_identity: str | None = None  # of its blocks in cache tiers, in hex; None without tiers
    speculates: bool = False  # steps verify guessed tokens, with the same output
    # Sampling parameters that the model's files recommend for chats. None: the backend has defaults
    # of its own, or the model does not chat.
    recommended: dict[str, Any] | None = None

    @property
    def chat_sampling(self) -> dict[str, Any]:
        """What `engine run`, `engine chat` and the web page send unless the user says otherwise:
        what the model's files recommend, or a low temperature. A preset has the last word.
        """
        if self.recommended is None:
            return {}
        preset = {} if self.preset is None else self.preset.parameters
        usual = {**USUAL_SAMPLING, **self.recommended}
        return {name: preset.get(name, value) for name, value in usual.items()}

    def of_adapter(self, name: str, created: int, tenant: str | None) -> "ModelCard":
        """The card of a LoRA adapter, if this is the card of its base model."""
        return msgspec.structs.replace(
            self, id=name, root=self.id, parent=self.id, created=created, tenant=tenant
        )


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's report on its state. If `ready` is false, the server admits no requests for
    it.
    """

    ready: bool
    detail: str
    # Seconds since the last engine step, while work is pending. None when the engine is idle.
    step_age_s: float | None = None
    num_restarts: int = 0  # restarts of the engine so far
    num_revived: int = 0  # how often a request continued in another engine, over all requests
    # False if the model is not in memory. The backend may still be ready; then the next request
    # loads the model.
    loaded: bool = True
    # False if the engine is down for longer than restarting it may take. Then only a restart of the
    # whole server may help.
    alive: bool = True
