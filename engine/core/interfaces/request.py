"""What a generation is asked for, and the messages between a frontend and an engine.

All of it is msgspec structs, so that a message is bytes with a schema and never a pickle. Text
stays with the frontend: the engine sees token ids only.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Ranges are checked at the edges, not here."""

    max_tokens: int | None = 16  # None: as many as the context has room for
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: drawn at submission
    n: int = 1
    stop: tuple[str, ...] = ()  # found by the frontend
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives beside the chosen token; None: no logprobs at all
    score_prompt: bool = False  # with logprobs: those of the prompt's own tokens as well

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Frontend to engine: generate `params.n` choices from `prompt`."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    priority: int = 0  # lower runs first
    salt: str = ""  # prefix-cache namespace: requests share blocks only within one
    tenant: str = ""  # whose it is: tenants get equal shares of an engine that can't serve all
    timeout_s: float | None = None  # from submission; past it the request ends with code TIMEOUT
    queue_timeout_s: float | None = None  # from submission; who has not begun by then is refused
    grammar: str | None = None  # in llguidance's form: what the output must match
    pools: bool = False  # no text is wanted, but one vector for the prompt


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Frontend to engine: forget a request, or one choice of it. Unknown ids are ignored."""

    request_id: str
    choice: int | None = None


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Frontend to engine: an operation on the engine itself, answered by a `ControlReply`."""

    control_id: int
    action: Literal["flush_cache", "log_level"]
    value: str = ""  # the level


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Frontend to engine: finish nothing more, release everything, exit."""


class Examine(msgspec.Struct, frozen=True, tag="examine"):
    """Frontend to a process that has no options yet: have a model examined in a fork of it."""

    examiner: str
    path: str
    max_cpu_s: int


class Examined(msgspec.Struct, frozen=True, tag="examined"):
    """Engine to frontend: how the examination's process ended, and what it wrote."""

    status: int
    output: bytes


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token, with the most likely alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one choice. The last delta of a choice has a `finish_reason`."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended it, when one did; it is in token_ids too
    num_cached: int = 0  # prompt tokens taken from the cache; set on a choice's first delta
    queue_s: float = 0.0  # submission to first scheduled; set on a choice's first delta
    prefill_s: float = 0.0  # first scheduled to first token; set on a choice's first delta
    error_code: str | None = None  # with finish_reason "error": the EngineError code
    error_message: str | None = None
    # On a choice's first delta, if asked for: of every prompt token but the first.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    vector: bytes | None = None  # float32, of a request that pools; its only delta


STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
STEP_TOKENS = tuple(2**power for power in range(15))


class StepCounts(msgspec.Struct, frozen=True, array_like=True):
    """Steps of an engine so far, by buckets of duration and size, and the totals. The last bucket
    is above every edge. The engine counts every step; a frontend sees only some of them.
    """

    by_seconds: tuple[int, ...] = (0,) * (len(STEP_SECONDS) + 1)
    by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    seconds: float = 0.0
    tokens: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return self._with(other, 1)

    def __sub__(self, other: "StepCounts") -> "StepCounts":
        return self._with(other, -1)

    def _with(self, other: "StepCounts", sign: int) -> "StepCounts":
        def each(own: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
            return tuple(a + sign * b for a, b in zip(own, others, strict=True))

        return StepCounts(
            each(self.by_seconds, other.by_seconds),
            each(self.by_tokens, other.by_tokens),
            self.seconds + sign * other.seconds,
            self.tokens + sign * other.tokens,
        )


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Gauges and running totals of one engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_referenced_blocks: int = 0  # held by at least one sequence
    block_size: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0  # computed or taken from the cache
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there
    num_preemptions: int = 0
    num_evictions: int = 0
    num_nonfinite: int = 0
    num_invariant_failures: int = 0
    steps: StepCounts = StepCounts()


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Engine to frontend, once: the model is loaded and warmed up."""

    max_seq_len: int
    num_blocks: int
    block_size: int
    max_slots: int
    dtype: str
    device: str
    load_s: float


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """Engine to frontend: everything one step produced."""

    deltas: tuple[TokenDelta, ...]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    stats: EngineStats


class ControlReply(msgspec.Struct, frozen=True, tag="control_reply"):
    control_id: int
    ok: bool
    message: str = ""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """Engine to frontend: the engine cannot go on; every open request is lost."""

    code: str
    message: str


ToEngine = GenerateRequest | Abort | Control | Stop
FromEngine = Ready | Deltas | Stats | ControlReply | Fatal
