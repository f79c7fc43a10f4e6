"""Sampling parameters, and the messages between the frontend and an engine process.

All of them are msgspec structs, so a message is encoded by its schema and never pickled. The
frontend tokenizes and detokenizes; the engine only sees token ids.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from engine.core.interfaces.handover import Handover
from engine.core.interfaces.interp import InterpRequest
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.core.interfaces.timeline import Preparation, Timeline

FinishReason = Literal["stop", "length", "abort", "error"]

DRY_BREAKERS = ("\n", ":", '"', "*")


class Sampler(msgspec.Struct, frozen=True):
    """A step of llama.cpp's chain, which `SamplingParams.samplers` can name."""

    letter: str  # its name in llama.cpp's short form
    off: dict[str, float]  # values of its parameters with which it does nothing
    truncates: bool = True  # whether it excludes unlikely tokens


# In the default order of llama.cpp.
SAMPLER_TABLE = {
    "penalties": Sampler(
        "e",
        {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        truncates=False,
    ),
    "dry": Sampler("d", {"dry_multiplier": 0.0}, truncates=False),
    "top_n_sigma": Sampler("s", {"top_n_sigma": 0.0}),
    "top_k": Sampler("k", {"top_k": 0}),
    "typical_p": Sampler("y", {"typical_p": 1.0}),
    "top_p": Sampler("p", {"top_p": 1.0}),
    "min_p": Sampler("m", {"min_p": 0.0}),
    "xtc": Sampler("x", {"xtc_probability": 0.0}),
    "temperature": Sampler("t", {"temperature": 1.0, "dynatemp_range": 0.0}, truncates=False),
}
SAMPLERS = tuple(SAMPLER_TABLE)
# The order of requests that use no sampler of llama.cpp. It is the order of the device samplers.
USUAL_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
TRUNCATING_FIELDS = tuple(
    name for each in SAMPLER_TABLE.values() if each.truncates for name in each.off
)
INFINITY = float("inf")


class Bound(msgspec.Struct, frozen=True):
    """The values that a parameter may have, besides None. An infinite end is not one of them."""

    low: float
    high: float | None = None
    excludes_low: bool = False

    def rule(self, name: str) -> str:
        if self.high is None:
            return f"{name} >= {self.low:g}"
        below = "<" if self.excludes_low else "<="
        above = "<" if self.high == INFINITY else "<="
        return f"{self.low:g} {below} {name} {above} {self.high:g}"

    def allows(self, value: float | None) -> bool:
        """Whether the parameter may be `value`. It may not be NaN."""
        if value is None:
            return True
        is_above = self.low < value if self.excludes_low else self.low <= value
        is_below = value < INFINITY if self.high in (None, INFINITY) else value <= self.high
        return is_above and is_below


NumberAboveZero = Annotated[float, Bound(0, INFINITY, excludes_low=True)]
AnyNumber = Annotated[float, Bound(-INFINITY, INFINITY, excludes_low=True)]
NotNegative = Annotated[float, Bound(0, INFINITY)]
Fraction = Annotated[float, Bound(0, 1)]
Count = Annotated[int, Bound(0)]
LastTokens = Annotated[int, Bound(-1)]  # -1: all tokens


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Only the Python API checks the bounds given here. The HTTP APIs check
    narrower ones (`sampling_fields.py`).
    """

    # None: generate up to the end of the context
    max_tokens: Annotated[int | None, Bound(1)] = 16
    min_tokens: Count = 0
    temperature: NotNegative = 1.0
    top_k: Count = 0  # 0: top-k is off
    top_p: Annotated[float, Bound(0, 1, excludes_low=True)] = 1.0
    min_p: Fraction = 0.0
    repetition_penalty: NumberAboveZero = 1.0
    presence_penalty: AnyNumber = 0.0
    frequency_penalty: AnyNumber = 0.0
    logit_bias: dict[int, float] = {}
    # Biases of all tokens of a text. The frontend adds them to `logit_bias`.
    text_bias: dict[str, float] = {}
    seed: int | None = None  # None: a random seed is chosen when the request is submitted
    n: Annotated[int, Bound(1)] = 1
    stop: tuple[str, ...] = ()  # stop strings, matched by the frontend
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # Number of alternatives to return per token. None: no logprobs
    logprobs: Annotated[int | None, Bound(0)] = None
    score_prompt: bool = False  # whether to return logprobs of the prompt's tokens too
    # Number of alternatives to return per prompt token, with `score_prompt`. None: `logprobs`
    prompt_logprobs: int | None = None
    # If not empty, the alternatives are these tokens and the sampled one, instead of the likeliest.
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True  # False: names of control tokens are part of the text
    # The fields from here on are `SAMPLER_FIELDS`.
    allowed_token_ids: tuple[int, ...] = ()  # if not empty, no other token is sampled
    bad_words: tuple[str, ...] = ()  # texts that the output must not contain
    stop_regex: tuple[str, ...] = ()  # regular expressions, matched by the frontend
    repeat_last_n: LastTokens = -1  # how many last tokens the penalties look at
    dry_multiplier: NotNegative = 0.0  # 0: DRY is off
    dry_base: Annotated[float, Bound(1, INFINITY)] = 1.75
    dry_allowed_length: Count = 2
    dry_penalty_last_n: LastTokens = -1  # how many last tokens DRY looks at
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    top_n_sigma: AnyNumber = 0.0  # 0: off
    typical_p: Fraction = 1.0  # 1: off
    xtc_probability: Fraction = 0.0  # 0: XTC is off
    xtc_threshold: Fraction = 0.1
    min_keep: Count = 0  # min number of tokens that top-p, min-p, typical-p and XTC each keep
    dynatemp_range: NotNegative = 0.0  # 0: the temperature is the same for each token
    dynatemp_exponent: NotNegative = 1.0
    mirostat: Literal[0, 1, 2] = 0  # the version; 0: off
    mirostat_tau: NotNegative = 5.0
    mirostat_eta: NotNegative = 0.1
    samplers: tuple[str, ...] = ()  # names in `SAMPLERS`, in order. Empty: the default order

    @property
    def num_prompt_logprobs(self) -> int:
        return self.logprobs or 0 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def named_samplers_only(self) -> "SamplingParams":
        """The same parameters, but with every sampler off that `samplers` does not name."""
        changes: dict[str, float] = {}
        for name in SAMPLERS if self.samplers else ():
            if name not in self.samplers:
                changes |= SAMPLER_TABLE[name].off
        return msgspec.structs.replace(self, **changes)

    @property
    def has_chain(self) -> bool:
        """Whether the parameters need llama.cpp's chain of samplers. Then the temperature comes
        last.
        """
        return (
            bool(self.samplers or self.mirostat)
            or self.typical_p < 1.0
            or self.top_n_sigma > 0.0
            or self.xtc_probability > 0.0
            or self.dynatemp_range > 0.0
            or self.min_keep > 1
        )

    @property
    def sampled_on_host(self) -> bool:
        """Whether tokens are sampled on the host, because devices lack a sampler for them."""
        return self.has_chain or (self.has_penalties and self.repeat_last_n >= 0)


_FIELDS = SamplingParams.__struct_fields__
# The parameters that few servers have.
SAMPLER_FIELDS = _FIELDS[_FIELDS.index("allowed_token_ids") :]
_DEFAULTS = msgspec.structs.asdict(SamplingParams())
# The parameters that are a number or a truth value, and are the same in all APIs that have them.
NUMBER_FIELDS = tuple(
    name
    for name, value in _DEFAULTS.items()
    if isinstance(value, int | float) and name not in ("max_tokens", "n", "score_prompt")
)
# Those of `SAMPLER_FIELDS` that are lists.
LIST_FIELDS = tuple(name for name in SAMPLER_FIELDS if isinstance(_DEFAULTS[name], tuple))


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image, or one tile of it, that was scaled to the size which the model reads."""

    start: int  # position of its first token in the prompt
    count: int  # number of its tokens
    height: int
    width: int
    pixels: bytes  # rows of red, green and blue bytes


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """A choice that began in an engine which died, and that continues in another engine."""

    choice: int
    token_ids: tuple[int, ...]  # the tokens that it has generated
    surprise_limit: float | None = None  # of its last delta


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: a hash of its content, and where its files are."""

    key: str
    path: str
    changes_head: bool = True  # whether the LM head is not that of the base model


class AdapterFacts(msgspec.Struct, frozen=True):
    """What the frontend is told about a loaded adapter. `key` identifies its content."""

    key: str
    rank: int
    num_bytes: int
    changes_head: bool


# Begins a salt that no other request has. Blocks with such a salt are not stored in cache tiers.
UNSHARED = "unshared:"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Frontend to engine: generate `params.n` choices from `prompt`."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    priority: int = 0  # requests with a lower value run first
    salt: str = ""  # only requests with the same salt share prefix-cache blocks
    tenant: str = ""  # owner of the request; tenants get equal shares of a busy engine
    # After this many seconds from submission, the request ends with error code TIMEOUT.
    timeout_s: float | None = None
    # The request is refused if it has not started this many seconds after submission.
    queue_timeout_s: float | None = None
    grammar: str | None = None  # llguidance grammar that the output must match
    pools: bool = False  # if true, return one embedding vector for the prompt and generate nothing
    images: tuple[ImageInput, ...] = ()  # in the order of the prompt
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of `params.bad_words`
    # Token sequences with which a text of `params.dry_sequence_breakers` ends
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    # The output that the client expects, or a part of it. Drafts are taken from it.
    expected: tuple[int, ...] = ()
    # Send a delta after each step that computes a part of the prompt.
    reports_progress: bool = False
    # Send a delta when the first step of the request starts, unless that step samples a token.
    tells_begin: bool = False
    # Only for encoders: in a pair of texts, the index of the first token with token type 1. 0: all
    # tokens have type 0
    second_start: int = 0
    # The choices that have not ended, if the request was in an engine that died. None: it is new
    resumed: tuple[Resumed, ...] | None = None
    adapter: AdapterRef | None = None  # None: the base model answers
    interp: InterpRequest | None = None  # what the request reads and changes inside the model
    handover: Handover | None = None  # a prefill node has computed the prompt
    keeps_blocks: bool = False  # another engine will fetch the blocks of the prompt


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Frontend to engine: abort a request, or one of its choices. Unknown ids are ignored."""

    request_id: str
    choice: int | None = None


# "report_cache" makes the engine send a `CachedPrefixes` message with all that it has cached, and
# further ones with the changes.
# "serve_blocks" makes a prefill engine serve blocks. `value` has the token that others need, and
# the address of this machine to use if `nodes.block_listen` names none. The reply has the
# port.
ControlAction = Literal[
    "flush_cache", "log_level", "snapshot", "report_cache", "load_adapter", "serve_blocks"
]


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Frontend to engine: an operation on the engine itself, answered by a `ControlReply`."""

    control_id: int
    action: ControlAction
    value: str = ""  # the new level for action "log_level"; the path for action "load_adapter"


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Frontend to engine: abort all requests, release their memory and exit."""


class Validate(msgspec.Struct, frozen=True, tag="validate"):
    """Frontend to an engine process that has no options yet: parse a model file in a forked child
    process, before the model is loaded from it.
    """

    validator: str
    path: str
    max_cpu_s: int


class Validated(msgspec.Struct, frozen=True, tag="validated"):
    """Engine to frontend: the exit status and output of the child that `Validate` started."""

    status: int
    output: bytes


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a chosen token, and the likeliest alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that one engine step added to one choice. The last delta of a choice has a
    `finish_reason`.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    # The stop token that ended the choice; it is also in `token_ids`.
    stop_token_id: int | None = None
    num_cached: int = 0  # prompt tokens taken from the cache; set on a choice's first delta
    # Seconds from submission to the first scheduling. Set on a choice's first delta.
    queue_s: float = 0.0
    # Seconds from the first scheduling to the first token. Set on a choice's first delta.
    prefill_s: float = 0.0
    error_code: str | None = None  # with finish_reason "error": the EngineError code
    error_message: str | None = None
    # Logprobs of all prompt tokens except the first. Set on a choice's first delta, if requested.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    vector: bytes | None = None  # float32 embedding; set on the only delta of a pooling request
    # Number of computed prompt tokens, the cached ones included. Such a delta has no tokens.
    num_processed: int = 0
    # With Mirostat: the limit for the surprise of the token after this one
    surprise_limit: float | None = None
    # The draft tokens that the step verified, and how many of them were right. Set on the first
    # delta of a choice in the step.
    num_drafted: int = 0
    num_accepted: int = 0
    timeline: Timeline | None = None  # set on the last delta of a choice that was queued
    # A piece of what the choice read inside the model, which is a safetensors file. The last piece
    # is in the choice's last delta; the deltas of the others have nothing else.
    captured: bytes | None = None
    # With finish_reason "error": the seconds after which the client should try again
    retry_after: float | None = None
    captured_at: int = 0  # where the piece begins; 0 begins the file anew
    # The first step of the request starts, and it will not be refused any more. Such a delta has
    # nothing else.
    begins: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Engine to frontend, sent once: the model is loaded and warmed up."""

    max_seq_len: int
    num_blocks: int
    block_size: int
    max_slots: int
    dtype: str
    device: str
    load_s: float
    speculates: bool = False
    # Hex; equal for engines that find each other's blocks in tiers. Empty without tiers.
    cache_identity: str = ""


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """Engine to frontend: all deltas of one step. The frontend may join those of several steps."""

    deltas: tuple[TokenDelta, ...]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    stats: EngineStats


class CachedPrefixes(msgspec.Struct, frozen=True, tag="cached"):
    """Engine to frontend, if it was asked to report: how its prefix cache has changed. The numbers
    are hashes of prefixes (`core/prefix_hashes.py`).
    """

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_all: bool = False  # `added` are all cached prefixes; what was reported before is void


class ControlReply(msgspec.Struct, frozen=True, tag="control_reply"):
    control_id: int
    ok: bool
    message: str = ""
    snapshot: EngineSnapshot | None = None  # for action "snapshot", unless an encoder answers


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """Engine to frontend: the engine can't continue. All requests that have not ended are lost."""

    code: str
    message: str


ToEngine = GenerateRequest | Abort | Control | Stop
FromEngine = Ready | Deltas | Stats | CachedPrefixes | ControlReply | Fatal


# Max timelines, preparations and recorded requests that are kept of one HTTP request.
MAX_PARTS = 64


class RecordedRequest(msgspec.Struct):
    """A request as the engine got it, with the tokens that it generated."""

    request: GenerateRequest  # has a seed
    fingerprint: str  # of the model and of how it is computed
    token_ids: dict[int, list[int]] = {}  # of each choice


@dataclass(slots=True)
class RequestNotes:
    """Collects what a backend tells about one HTTP request, which may have several prompts."""

    preparations: list[Preparation] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    # One entry for each prompt. None: requests are not recorded
    recorded: list[RecordedRequest] | None = None

    def add_timeline(self, timeline: Timeline) -> None:
        if len(self.timelines) < MAX_PARTS:
            self.timelines.append(timeline)

    def add_preparation(self, preparation: Preparation) -> None:
        if len(self.preparations) < MAX_PARTS:
            self.preparations.append(preparation)

    def record(self, request: GenerateRequest, fingerprint: str) -> RecordedRequest | None:
        """Begin to record a request. None if requests are not recorded."""
        if self.recorded is None or len(self.recorded) >= MAX_PARTS:
            return None
        made = RecordedRequest(request, fingerprint)
        self.recorded.append(made)
        return made
