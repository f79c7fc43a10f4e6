"""The seam between the shared runtime and a framework: plain arrays in, plain arrays out.

A step is two calls. `forward` runs the model over a mixed batch and returns a handle; `sample`
turns the handle's logits into tokens. Between them the host may compute what depends on the
previous step's tokens. `PendingTokens.wait` is the only place where the host waits for the device.

Letters: T tokens of the step, S rows (sequences), R rows that sample, B blocks per table, V
vocabulary.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FROM_DEVICE = -1  # in token_ids: the slot's last sampled token, which the host may not know yet
SAMPLE = -1  # in forced: nothing is
NULL_BLOCK = 0  # never owned by a sequence; padding writes there
# `target_step_s` on a GPU: large steps use it best, and it soon has no prompt left to compute.
GPU_STEP_S = 0.2
# Prompt tokens scored in one step: each needs a row of logits as wide as the vocabulary.
MAX_SCORED = 128
PROMPT_TOKENS = 64  # fewer in a step cost hardly less where weights are decoded for them

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How a framework is to load a model; memory has been planned by the caller."""

    device: str  # "cpu", "cuda", "cuda:1"
    dtype: str  # "float32", "bfloat16", "float16"
    block_size: int
    num_blocks: int  # counts the null block
    max_slots: int
    max_seq_len: int
    num_threads: int | None  # None: the framework's choice
    attention: str = "auto"  # name in the framework's attention registry
    max_batch_tokens: int = 2048  # of one step
    kv_dtype: str = "auto"  # "float32", "bfloat16", "int8"; "auto": the framework's choice
    numerics: str = "invariant"  # "fast": rounding may depend on how many rows share a step
    affinity: str = "auto"  # "auto", "off", or CPU numbers such as "0-3,8"
    quantization: str = "auto"  # of weights: "fp8", "int8"; "auto": as they are stored


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Where a framework would run a model, once "auto" has been decided."""

    name: str
    dtype: str
    free_bytes: int
    copies_tied_head: bool = False  # it keeps its own copy of a head tied to the embeddings


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a loaded runner can hold. `num_blocks` counts the null block."""

    block_size: int
    num_blocks: int
    max_slots: int
    max_seq_len: int
    vocab_size: int
    depth: int  # 1: `sample` returns before the device has finished; 0: it does not
    most_step_tokens: int | None = None  # a larger step gains nothing; None: the larger the better
    target_step_s: float | None = None  # how long prompts may keep others waiting; None: as usual
    least_prompt_tokens: int = PROMPT_TOKENS  # that a step with prompts is worth it for

    @classmethod
    def of(
        cls,
        config: RunnerConfig,
        vocab_size: int,
        depth: int,
        most_step_tokens: int | None = None,
        target_step_s: float | None = None,
        least_prompt_tokens: int = PROMPT_TOKENS,
    ) -> "RunnerSpec":
        """Of a runner that holds as much as its configuration says."""
        return cls(
            config.block_size,
            config.num_blocks,
            config.max_slots,
            config.max_seq_len,
            vocab_size,
            depth,
            most_step_tokens,
            target_step_s,
            least_prompt_tokens,
        )


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One step over S rows. Row s owns tokens query_start[s] : query_start[s + 1].

    A row's tokens are consecutive positions ending at seq_lens[s] - 1; its keys and values for
    positions 0 .. seq_lens[s] - 1 lie in block_tables[s], position p in block p // block_size.
    Tables are padded on the right with NULL_BLOCK. Arrays are fresh for every step and never
    written again.
    """

    token_ids: I32  # (T,)
    positions: I32  # (T,)
    write_slots: I64  # (T,) block * block_size + offset, where the token's key and value go
    query_start: I32  # (S + 1,)
    seq_lens: I32  # (S,)
    num_prompt: I32  # (S,) positions below are the prompt's, where arithmetic may differ
    block_tables: I32  # (S, B)
    slots: I32  # (S,) the row's permanent place in per-slot state
    logit_rows: I32  # (R,) indices into T whose logits `sample` will need
    adapter_ids: I32  # (S,) 0: the base model
    prefix_groups: I32  # (S,) rows with the same number >= 0 share their leading blocks; -1: none
    prefix_blocks: I32  # (G,) leading blocks that each group shares, all below every query


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each of the R sampling rows chooses. Order of application is the sampler's contract:

    penalties, bias, mask, temperature, top-k, top-p, min-p, draw. Temperature 0 is greedy. The draw
    is a pure function of (seed, choice, position), so a row's token never depends on its
    neighbours.
    """

    sample_rows: I32  # (R,) index into S
    slots: I32  # (R,)
    temperature: F32  # (R,)
    top_k: I32  # (R,) 0: off
    top_p: F32  # (R,) 1: off
    min_p: F32  # (R,) 0: off
    repetition: F32  # (R,) 1: off; over prompt and output
    presence: F32  # (R,) 0: off; over output
    frequency: F32  # (R,) 0: off; over output
    bias_rows: I32  # (N,) index into R
    bias_ids: I32  # (N,)
    bias_values: F32  # (N,) added to the logit; -inf bans the token
    seed: I64  # (R,)
    choice: I32  # (R,)
    position: I32  # (R,) of the token being drawn
    mask: U32 | None  # (R, ceil(V / 32)) bit v of row r set: token v is allowed
    forced: I32  # (R,) -1: draw; else this very token is "drawn", and its logprobs are told
    hidden_rows: I32  # (E,) index into R: rows whose final hidden state is wanted
    num_logprobs: I32  # (R,) -1: none, 0: the drawn token's only, k: k alternatives beside it
    # Token history for penalties, given once when a slot with penalties first samples after
    # admission;
    # the runner appends what it samples. Flattened: history h is tokens[start[h] : start[h + 1]].
    history_slots: I32  # (H,)
    history_start: I32  # (H + 1,)
    history_tokens: I32
    history_num_prompt: I32  # (H,)

    @property
    def all_greedy(self) -> bool:
        """No row draws at random (penalties, bias and masks may still apply)."""
        return not self.temperature.any()

    @property
    def has_penalties(self) -> bool:
        return bool((self.repetition != 1.0).any() or self.presence.any() or self.frequency.any())


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave, on the host. K is the largest num_logprobs of the step."""

    tokens: I32  # (R,)
    finite: Bools  # (S,) the row's states, which every layer adds to, were finite to the end
    logprobs: F32 | None = None  # (R,) of the drawn token, before temperature
    top_ids: I32 | None = None  # (R, K) most likely first
    top_logprobs: F32 | None = None  # (R, K)
    hidden: F32 | None = None  # (E, D) normed hidden state of the rows asked for


class PendingTokens(Protocol):
    def wait(self) -> StepOutput:
        """Block until the step is done. May be called once."""
        ...


class ModelRunner(Protocol):
    """A loaded model with its paged KV tensors; later calls see what earlier ones wrote."""

    @property
    def spec(self) -> RunnerSpec: ...

    def forward(self, inputs: BatchInputs) -> Any:
        """Write keys and values, compute what `sample` needs. The handle is opaque."""
        ...

    def sample(self, handle: Any, sampling: SamplingInputs) -> PendingTokens:
        """Draw the tokens of the handle's rows; also called (with R = 0) when no row samples."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All calls of one kernel; on a CPU, of one operation or of one step of every layer."""

    name: str
    calls: int
    seconds: float


class Profiler(Protocol):
    """What a framework knows of its own time. As a context it records."""

    def barrier(self, name: str) -> AbstractContextManager[None]:
        """Around a call of the runner: does not end before the device has done the call's work."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """Around a call of the runner while recording."""
        ...

    def __enter__(self) -> "Profiler": ...

    def __exit__(self, *error: object) -> None: ...

    def kernels(self) -> list[KernelTime]:
        """Of what was recorded, slowest first."""
        ...

    def write_trace(self, path: Path) -> None:
        """What was recorded as a Chrome trace."""
        ...
