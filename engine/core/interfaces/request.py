"""Sampling parameters, and the messages between a frontend and an engine.

All are msgspec structs, so a message is bytes with a schema and never a pickle. Text stays in the
frontend: the engine only sees token ids.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Ranges are validated by the APIs, not here."""

    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 turns it off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: chosen at submission
    n: int = 1
    stop: tuple[str, ...] = ()  # stop strings, matched by the frontend
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives per token; None: no logprobs
    score_prompt: bool = False  # with logprobs: also for the prompt's tokens

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
    tenant: str = ""  # owner; tenants get equal shares of a busy engine
    timeout_s: float | None = None  # from submission; then the request ends with code TIMEOUT
    queue_timeout_s: float | None = None  # from submission; refused if not started by then
    grammar: str | None = None  # llguidance grammar of the output
    pools: bool = False  # return one vector for the prompt, no text


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Frontend to engine: abort a request, or one of its choices. Unknown ids are ignored."""

    request_id: str
    choice: int | None = None


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Frontend to engine: an operation on the engine itself, answered by a `ControlReply`."""

    control_id: int
    action: Literal["flush_cache", "log_level"]
    value: str = ""  # of action log_level: the level


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Frontend to engine: abort everything, release it, exit."""


class Examine(msgspec.Struct, frozen=True, tag="examine"):
    """Frontend to a process that has no options yet: inspect a model file in a fork."""

    examiner: str
    path: str
    max_cpu_s: int


class Examined(msgspec.Struct, frozen=True, tag="examined"):
    """Engine to frontend: exit status and output of that inspection."""

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
    stop_token_id: int | None = None  # the token id that ended the choice; also in token_ids
    num_cached: int = 0  # prompt tokens taken from the cache; set on a choice's first delta
    queue_s: float = 0.0  # submission to first scheduled; on a choice's first delta
    prefill_s: float = 0.0  # first scheduled to first token; set on a choice's first delta
    error_code: str | None = None  # with finish_reason "error": the EngineError code
    error_message: str | None = None
    # On a choice's first delta, if requested: logprobs of every prompt token but the first.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    vector: bytes | None = None  # float32 bytes of a pooling request, on its only delta


STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
STEP_TOKENS = tuple(2**power for power in range(15))


class StepCounts(msgspec.Struct, frozen=True, array_like=True):
    """An engine's step counts, in buckets of duration and of size, and their sums. The last bucket
    has no upper edge. The engine counts every step; a frontend only sees some of them.
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
    """Gauges and cumulative counters of one engine."""

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
    prefix_hits: int = 0  # prompt tokens found in the prefix cache
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
    """Engine to frontend: all deltas of one step."""

    deltas: tuple[TokenDelta, ...]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    stats: EngineStats


class ControlReply(msgspec.Struct, frozen=True, tag="control_reply"):
    control_id: int
    ok: bool
    message: str = ""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """Engine to frontend: the engine can't continue; every open request is lost."""

    code: str
    message: str


ToEngine = GenerateRequest | Abort | Control | Stop
FromEngine = Ready | Deltas | Stats | ControlReply | Fatal
