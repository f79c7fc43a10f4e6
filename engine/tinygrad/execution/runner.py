"""The tinygrad model runner and its captured steps. Logits are copied to the host, which samples
the tokens.

tinygrad compiles a program per shape, so steps are padded to one of few sizes. The context length
of attention is a variable of the program, not a shape.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from engine.runners.scoring import Scoring
from engine.runtime.model_runner import (
    F32,
    FROM_DEVICE,
    I32,
    BatchInputs,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.runtime.outputs import step_output
from engine.runtime.samplers.host_sampler import HostSampler
from engine.tinygrad.kernels.attention import (
    Pages,
    PerHead,
    Work,
    attend,
    write,
)
from engine.tinygrad.kernels.rows import take_rows
from engine.tinygrad.layers.rotary import Rotation
from engine.tinygrad.models.base import (
    Model,
    decode,
    final_norm,
    head_logits,
)

# Step sizes in tokens: 1, then MIN_SIZE times powers of GROWTH.
MIN_SIZE, GROWTH = 8, 4


def padded_size(count: int) -> int:
    if count == 1:
        return 1
    size = MIN_SIZE
    while size < count:
        size *= GROWTH
    return size


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache and its limits. Steps of all sizes share it."""

    pages: tuple[Pages, ...]  # keys and values of each layer
    block_size: int
    max_blocks: int  # max number of blocks of one sequence
    max_rows: int
    device: str


def make_cache(
    model: Model,
    num_blocks: int,
    block_size: int,
    max_seq_len: int,
    max_rows: int,
    dtype: DType,
    device: str,
) -> Cache:
    """Allocates the KV cache, filled with zeros."""
    config = model.config

    def room(*shape: int) -> Tensor:
        return Tensor.zeros(num_blocks, config.num_kv_heads, *shape, dtype=dtype, device=device)

    has_values = config.latent is None
    pages = [
        Pages(
            room(config.head_dim, block_size).contiguous().realize(),
            room(block_size, config.head_dim).contiguous().realize() if has_values else None,
        )
        for _ in range(config.num_layers)
    ]
    # The max is at least 2. The number of blocks is a tinygrad variable, which kernels need as an
    # argument, and tinygrad replaces a variable that has only one possible value by a constant.
    max_blocks = max(2, -(-max_seq_len // block_size))
    return Cache(tuple(pages), block_size, max_blocks, max_rows, device)


class Input:
    """An input array of a step. Captured steps read it at a fixed address, so its device memory
    stays the same.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DType, device: str) -> None:
        self.tensor = Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()
        self._buffer = self.tensor.uop.base.buffer
        self._host = np.zeros(shape, np.float32 if dtype == dtypes.float32 else np.int32)
        memory = self._host.reshape(-1).view(np.uint8).data
        self._source = Buffer("PYTHON", self._host.size, dtype, opaque=memory)

    def put(self, values: NDArray[np.generic]) -> None:
        """Copies the values to the device. The rest of the array is filled with zeros, so that no
        values of earlier steps remain.
        """
        self._host.fill(0)
        self._host[tuple(slice(size) for size in values.shape)] = values
        self._buffer.copy_from(self._source)


@dataclass(frozen=True, slots=True)
class ForwardResults:
    """The results of a forward pass, on the device. They are valid until the next forward pass of
    the same size overwrites them.
    """

    states: Tensor  # (T, D) the residual stream; tokens whose logits are needed come first
    sums: Tensor  # (T,) the sum of each token's residual stream, to detect NaN and infinity


class ForwardStep:
    """The forward pass for steps of one size, with its input arrays and its captured program."""

    def __init__(self, model: Model, cache: Cache, size: int) -> None:
        self._model, self._cache = model, cache

        def numbers(*shape: int) -> Input:
            return Input(shape, dtypes.int32, cache.device)

        self._token_ids, self._positions, self._write_slots = (numbers(size) for _ in range(3))
        self._rows, self._logit_rows = numbers(size), numbers(size)
        # There are at least two block tables. With one, a kernel would not need the row index, and
        # tinygrad would then number the kernel's arguments wrongly.
        self._tables = numbers(max(2, min(size, cache.max_rows)), cache.max_blocks)
        # The cosines and the sines of each RoPE setting.
        self._rotations = {
            rope: tuple(
                Input((size, table.shape[1]), dtypes.float32, cache.device) for table in tables
            )
            for rope, tables in model.rotary.items()
        }
        self._program = TinyJit(self._forward)

    def __call__(self, inputs: BatchInputs, token_ids: I32) -> ForwardResults:
        """Runs the forward pass. In `token_ids`, FROM_DEVICE is already replaced by real tokens."""
        counts = np.diff(inputs.query_start)
        self._token_ids.put(token_ids)
        self._positions.put(inputs.positions)
        self._write_slots.put(inputs.write_slots)
        self._rows.put(np.repeat(np.arange(len(counts)), counts))
        self._logit_rows.put(inputs.logit_rows)
        self._tables.put(inputs.block_tables[:, : self._cache.max_blocks])
        for rope, places in self._rotations.items():
            for place, table in zip(places, self._model.rotary[rope], strict=True):
                place.put(table[inputs.positions])
        num_blocks = -(-int(inputs.seq_lens.max()) // self._cache.block_size)
        variable = Variable("num_blocks", 1, self._cache.max_blocks)
        return ForwardResults(*self._program(variable.bind(num_blocks)))

    def _forward(self, num_blocks: UOp) -> tuple[Tensor, Tensor]:
        work = Work(
            self._positions.tensor,
            self._write_slots.tensor,
            self._rows.tensor,
            self._tables.tensor,
            num_blocks,
        )

        def write_and_attend(
            layer: int, scoring: Scoring, per_head: PerHead, q: Tensor, k: Tensor, v: Tensor
        ) -> Tensor:
            pages = write(self._cache.pages[layer], k, v, work.write_slots)
            return attend(q, pages, work, scoring, per_head, v.shape[-1])

        rotations = {
            rope: Rotation(*(place.tensor for place in places))
            for rope, places in self._rotations.items()
        }
        ids, positions = self._token_ids.tensor, self._positions.tensor
        state = decode(self._model, ids, positions, rotations, write_and_attend)[-1]
        states = take_rows(state, self._logit_rows.tensor)
        return states, state.float().sum(axis=-1)


class HeadStep:
    """Computes the logits of the first `num_rows` tokens in a step's residual stream. There is one
    captured program per number of rows.
    """

    def __init__(self, model: Model, num_rows: int) -> None:
        self._model, self._num_rows = model, num_rows
        self._program = TinyJit(self._logits)

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the hidden states after the final norm (R, D) and the logits (R, V), float32."""
        hidden, logits = self._program(states)
        return hidden, logits

    def _logits(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = final_norm(self._model, states[: self._num_rows]).contiguous()
        return hidden.float().contiguous(), head_logits(self._model, hidden).contiguous()


@dataclass(frozen=True, slots=True)
class StepHandle:
    """The result of `forward`, which the caller passes to `sample`."""

    size: int
    forwarded: ForwardResults
    query_start: I32


@dataclass(frozen=True, slots=True)
class FinishedTokens:
    """The sampled tokens of a step. The step has already finished, so `wait` returns at once."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class TinygradRunner:
    def __init__(self, model: Model, cache: Cache, spec: RunnerSpec) -> None:
        self._spec = spec
        self._model, self._cache = model, cache
        self._forwards: dict[int, ForwardStep] = {}
        self._heads: dict[tuple[int, int], HeadStep] = {}
        self._last_token = np.zeros(spec.max_slots, np.int32)
        self._sampler = HostSampler(spec.vocab_size)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, inputs: BatchInputs) -> StepHandle:
        size = padded_size(len(inputs.token_ids))
        if size not in self._forwards:
            self._forwards[size] = ForwardStep(self._model, self._cache, size)
        slots = np.repeat(inputs.slots, np.diff(inputs.query_start))
        is_known = inputs.token_ids != FROM_DEVICE
        token_ids = np.where(is_known, inputs.token_ids, self._last_token[slots])
        return StepHandle(size, self._forwards[size](inputs, token_ids), inputs.query_start)

    def logits(self, handle: StepHandle, rows: I32) -> F32:
        _, logits = self._head(handle.size, int(rows.max()) + 1)(handle.forwarded.states)
        return logits.numpy()[rows]

    def sample(self, handle: StepHandle, sampling: SamplingInputs) -> FinishedTokens:
        finite = np.isfinite(handle.forwarded.sums.numpy())
        sampled, states, count = None, None, len(sampling.slots)
        if count:
            hidden, logits = self._head(handle.size, count)(handle.forwarded.states)
            sampled = self._sampler.sample(logits.numpy()[:count], sampling)
            keeps = sampling.keeps
            self._last_token[sampling.slots[keeps]] = sampled.tokens[keeps]
            states = hidden.numpy() if len(sampling.hidden_rows) else None
        return FinishedTokens(step_output(sampled, states, finite, handle.query_start, sampling))

    def close(self) -> None:
        """Frees the model and the KV cache. The runner cannot be used afterwards."""
        del self._model, self._cache, self._forwards, self._heads

    def _head(self, size: int, count: int) -> HeadStep:
        key = (size, padded_size(count))
        if key not in self._heads:
            self._heads[key] = HeadStep(self._model, key[1])
        return self._heads[key]
