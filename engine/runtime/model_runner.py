"""The interface between the shared runtime and a framework: a framework implements `ModelRunner`.
All arrays that the two exchange are numpy arrays.

A step is two calls. `forward` runs the model over a batch of prefill and decode rows, and returns a
handle. `sample` turns the handle's logits into tokens. Between the two calls, the host can do work
that needs the previous step's tokens. Only `PendingTokens.wait` waits for the device.

Letters: T tokens of the step, S rows (sequences), R rows that sample, B blocks per table, V
vocabulary, D size of an embedding, E tokens of images.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import EngineError

if TYPE_CHECKING:
    from engine.runtime.interp.taps import TapInputs

# As a token id, this means: use the slot's last sampled token, which may still be on the device.
FROM_DEVICE = -1
SAMPLE = -1  # in `SamplingInputs.forced`: sample a token for this row
NULL_BLOCK = 0  # no sequence owns this block; keys and values of padding tokens are written to it
# The target duration of a step on a GPU. It is long, because the GPU computes the most tokens per
# second in large steps.
GPU_STEP_S = 0.2
# The max number of prompt tokens per step whose logprobs are computed. Each of them needs logits
# over the whole vocabulary.
MAX_SCORED = 128
# Every step may compute this many prefill tokens, however long they take. With fewer tokens,
# dequantizing the weights would dominate the cost.
PROMPT_TOKENS = 64
ALL_ALLOWED = 0xFFFFFFFF  # a word of a token mask, with all bits set

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
# The groups of blocks that a runner may have. "full": blocks of all layers, or of the layers
# without a sliding window. "window": blocks of the layers with one. "state": states of sequences.
Group = Literal["full", "window", "state"]
GROUPS: tuple[Group, ...] = ("full", "window", "state")


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Settings with which a framework loads a model. The caller has already decided how many blocks
    fit the memory.
    """

    device: str  # "cpu", "cuda", "cuda:1"
    dtype: str  # "float32", "bfloat16", "float16"
    block_size: int
    num_blocks: int  # including the null block
    max_slots: int
    max_seq_len: int
    num_threads: int | None  # None: the framework chooses
    attention: str = "auto"  # name in the framework's attention registry
    max_batch_tokens: int = 2048  # max tokens per step
    kv_dtype: str = "auto"  # "float32", "bfloat16", "int8", "fp8"; "auto": the framework chooses
    # "invariant": rounding never depends on the other rows of a step. "fast": it may. "auto": the
    # framework chooses.
    numerics: str = "auto"
    affinity: str = "auto"  # CPUs to run on: "auto", "off", or numbers such as "0-3,8"
    # For models whose layers keep a state of each sequence: how many copies of states the prefix
    # cache may keep.
    num_checkpoints: int = 0
    # "fp8" or "int8": weights are requantized to this type. "auto": they keep the stored type.
    quantization: str = "auto"
    # The number of blocks in the pool of the layers with a sliding window, including the null
    # block. 0: all layers use the same pool.
    num_window_blocks: int = 0
    # Ranks that share each layer, and stages that the layers are divided into.
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    # Of these ranks, the last ones join from other machines at the address `shard_listen`.
    remote_ranks: int = 0
    shard_listen: str = ""
    shard_token: str = ""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device and dtype that a framework would use for a model, with "auto" resolved."""

    name: str
    dtype: str
    free_bytes: int
    copies_tied_head: bool = False  # a tied LM head is copied, not shared with the embeddings
    title: str = ""  # a GPU's name and platform, for messages
    bound: str = ""  # what limits `free_bytes`, for messages; "": only the device itself


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """Capacity and behaviour of a loaded runner. `num_blocks` includes the null block."""

    block_size: int
    num_blocks: int
    max_slots: int
    max_seq_len: int
    vocab_size: int
    depth: int  # 1: `sample` returns before the device has finished. 0: `sample` waits for it.
    # Steps with more tokens than this would not increase the throughput. None means no limit.
    max_step_tokens: int | None = None
    # Target duration of a step while sequences decode, in seconds. None means the default.
    target_step_s: float | None = None
    # Every step may compute this many prefill tokens, however long they take.
    min_prompt_tokens: int = PROMPT_TOKENS
    # A number of prefill tokens takes as long as the next multiple of this.
    prompt_grain: int = 1
    # The largest sliding window, if the layers with windows have a block pool of their own. None:
    # all layers use the same pool and block tables.
    window: int | None = None
    num_window_blocks: int = 0  # blocks of that pool, including its null block
    # Layers keep a state in each slot, which every step of the sequence changes. The state of slot
    # `max_slots` belongs to no sequence. The states after it are `num_checkpoints` copies.
    has_state: bool = False
    num_checkpoints: int = 0
    # Whether `sample` takes several rows of one slot, so that steps can verify drafts.
    verifies_drafts: bool = False
    # Whether a decode row of several tokens gives exactly the logits that rows of one token give.
    has_exact_drafts: bool = False
    # Whether steps are kept even while sequences decode (`prefill_throttle.py`), instead of within
    # a target duration. Steps with prefill are padded to one of `step_sizes`, if they are not
    # larger.
    paces: bool = False
    step_sizes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        config: RunnerConfig,
        vocab_size: int,
        depth: int,
        max_step_tokens: int | None = None,
        target_step_s: float | None = None,
        min_prompt_tokens: int = PROMPT_TOKENS,
        prompt_grain: int = 1,
        window: int | None = None,
        has_state: bool = False,
        verifies_drafts: bool = False,
        has_exact_drafts: bool = False,
    ) -> "RunnerSpec":
        """The spec of a runner whose capacity is exactly that of `config`."""
        return cls(
            config.block_size,
            config.num_blocks,
            config.max_slots,
            config.max_seq_len,
            vocab_size,
            depth,
            max_step_tokens,
            target_step_s,
            min_prompt_tokens,
            prompt_grain,
            window if config.num_window_blocks else None,
            config.num_window_blocks,
            has_state,
            config.num_checkpoints if has_state else 0,
            verifies_drafts and not has_state,  # the state after a rejected token cannot be undone
            has_exact_drafts,
        )


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Inputs of one step over S rows. Row s has the tokens query_start[s] : query_start[s + 1].

    The tokens of row s are at consecutive positions. The last one is at position seq_lens[s] - 1.
    The key and value of position p are in block block_tables[s, p // block_size]. Block tables are
    padded on the right with NULL_BLOCK. The arrays of a step are never modified later.
    """

    token_ids: I32  # (T,)
    positions: I32  # (T,)
    # (T,) where the token's key and value are written: block * block_size + offset in the block
    write_slots: I64
    query_start: I32  # (S + 1,)
    seq_lens: I32  # (S,)
    num_prompt: I32  # (S,) prompt length; prompt positions may use other kernels than decode
    block_tables: I32  # (S, B)
    slots: I32  # (S,) the sequence's index into per-sequence state, fixed while it runs
    logit_rows: I32  # (R,) indices into T of the tokens whose logits `sample` needs
    adapter_ids: I32  # (S,) the place of the row's LoRA adapter; 0: the base model
    # (S,) rows with the same group number share their first blocks; -1 means no group
    prefix_groups: I32
    # (G,) how many first blocks the rows of each group share. All positions in these blocks were
    # computed before this step.
    prefix_blocks: I32
    # Embeddings of images, and the indices into T of the tokens that they replace. None if no token
    # of the step belongs to an image.
    embeds: F32 | None = None  # (E, D)
    embed_rows: I32 | None = None  # (E,)
    # (T,) a token attends to the positions before this one. None: each token attends to the
    # positions up to its own.
    visible_end: I32 | None = None
    # (3, T) the positions by which RoPE rotates, in a model whose images have rows and columns (see
    # `RopeConfig.sections`). None: RoPE rotates by `positions`.
    rope_positions: I32 | None = None
    # The block tables and write slots of layers with a sliding window, if these layers have a block
    # pool of their own. A block that the window has left is freed, and its place is NULL_BLOCK.
    window_tables: I32 | None = None  # (S, B)
    window_slots: I64 | None = None  # (T,)

    def tables_for(self, window: int | None) -> I32:
        """The block tables of layers with this sliding window."""
        if window is None or self.window_tables is None:
            return self.block_tables
        return self.window_tables

    # For models whose layers keep a state, else None. (S,) the index of a state that is copied to
    # the row's slot before the step, or -1. A row that begins at position 0 begins with zeros.
    state_load: I32 | None = None
    # (S,) the index that the state of the row's slot is copied to after the step, or -1
    state_save: I32 | None = None
    # What requests read and change inside the step. None: nothing
    taps: "TapInputs | None" = None


def _none() -> I32:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters of the R rows that sample. For most parameters, one value means "off".

    Samplers apply them in this order: penalties, bias, mask, temperature, top-k, top-p, min-p,
    sample. Temperature 0 is greedy. The random numbers depend only on (seed, choice, position), so
    the token of a row never depends on the other rows.
    """

    sample_rows: I32  # (R,) index into S
    slots: I32  # (R,)
    temperature: F32  # (R,)
    top_k: I32  # (R,) 0: off
    top_p: F32  # (R,) 1: off
    min_p: F32  # (R,) 0: off
    repetition: F32  # (R,) 1: off; penalizes tokens of prompt and output
    presence: F32  # (R,) 0: off; penalizes tokens of the output
    frequency: F32  # (R,) 0: off; penalizes tokens of the output
    bias_rows: I32  # (N,) index into R
    bias_ids: I32  # (N,)
    bias_values: F32  # (N,) added to the logit; -inf bans the token
    seed: I64  # (R,)
    choice: I32  # (R,)
    position: I32  # (R,) position of the token being sampled
    mask: U32 | None  # (R, ceil(V / 32)); token v is allowed if bit v of row r is set
    forced: I32  # (R,) the token to return with its logprobs, or -1 to sample a token
    hidden_rows: I32  # (E,) index into R: rows whose final hidden state is returned
    # (R,) which logprobs to return. -1: none. 0: only that of the sampled token. k > 0: also those
    # of the k most likely tokens.
    num_logprobs: I32
    # Token histories for penalties. The history of a sequence is sent once, in the first step in
    # which it samples after admission. From then on, the runner appends each sampled token. All
    # histories are concatenated. History h starts at history_start[h] and ends before
    # history_start[h + 1].
    history_slots: I32 = field(default_factory=_none)  # (H,)
    history_start: I32 = field(default_factory=lambda: np.zeros(1, np.int32))  # (H + 1,)
    history_tokens: I32 = field(default_factory=_none)
    history_num_prompt: I32 = field(default_factory=_none)  # (H,)
    # (P,) index into R: rows whose token the host samples. `forced` has the token.
    host_rows: I32 = field(default_factory=_none)

    @property
    def keeps(self) -> Bools:
        """(R,) Whether the token of a row continues its sequence. Otherwise the row only returns
        the logprob of a prompt token.
        """
        kept: Bools = self.forced == SAMPLE
        kept[self.host_rows] = True
        return kept

    @property
    def all_greedy(self) -> bool:
        """Whether all rows have temperature 0. Penalties, bias and masks may still apply."""
        return not self.temperature.any()

    @property
    def has_penalties(self) -> bool:
        return bool((self.repetition != 1.0).any() or self.presence.any() or self.frequency.any())


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step, on the host. K is the largest num_logprobs of the step."""

    tokens: I32  # (R,)
    finite: Bools  # (S,) whether the residual stream after the last layer is finite
    # (R,) logprob of the sampled token, from the logits before penalties and temperature.
    logprobs: F32 | None = None
    top_ids: I32 | None = None  # (R, K) most likely first
    top_logprobs: F32 | None = None  # (R, K)
    hidden: F32 | None = None  # (E, D) final normed hidden state of the requested rows
    captured: F32 | None = None  # rows that taps captured, padded on the right; None: no taps


class PendingTokens(Protocol):
    def wait(self) -> StepOutput:
        """Block until the step is done. Call it only once."""
        ...


class ModelRunner(Protocol):
    """A loaded model with its paged KV cache. A call sees what earlier calls wrote to the cache."""

    @property
    def spec(self) -> RunnerSpec: ...

    def forward(self, inputs: BatchInputs) -> Any:
        """Run the model over a batch. Writes keys and values to the KV cache. Returns a handle,
        which the caller passes to `sample`.
        """
        ...

    def logits(self, handle: Any, rows: I32) -> F32:
        """Wait for the forward pass, and copy these rows of its logits to the host."""
        ...

    def sample(self, handle: Any, sampling: SamplingInputs) -> PendingTokens:
        """Sample a token for each of the R rows. `sample` is also called in steps in which no row
        samples (R = 0).
        """
        ...

    def close(self) -> None: ...


class RunnerLostError(EngineError):
    """The processes of a runner are gone. No request is at fault, and no step can run any more."""

    category = "model"
    status = 503
    code = "runner_lost"
    retryable = True


@runtime_checkable
class RemoteRunner(Protocol):
    """A runner whose steps run in other processes."""

    def check(self) -> None:
        """Raise `RunnerLostError` if they are gone."""
        ...


class ImageEncoder(Protocol):
    """The loaded image encoder of a model that reads images."""

    def encode(self, pixels: NDArray[np.uint8]) -> F32:
        """Compute the embeddings (E, D) of an image's tokens from its pixels (height, width, 3). It
        waits for the device.
        """
        ...


@runtime_checkable
class AdapterRunner(Protocol):
    """A runner that computes LoRA adapters."""

    def pack_adapter(self, adapter: Any) -> Any:
        """Bring an `Adapter` into the form that `set_adapter` takes. Any thread may call this."""
        ...

    def set_adapter(self, number: int, packed: Any) -> None:
        """Put an adapter into a place, from 1 on. Called between two steps. It must not wait."""
        ...


@runtime_checkable
class Warmable(Protocol):
    """A runner whose first step of each size takes longer than later ones."""

    def warm(self) -> None:
        """Prepare for steps of all sizes that the scheduler can ask for."""
        ...
