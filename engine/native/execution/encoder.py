"""The text encoder on the native kernels. It computes one vector, or one score, per text.

A step computes whole texts, one after the other, without padding. Each text has its own blocks of
a small KV cache, which all layers use in turn.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.ipc.options import EngineOptions
from engine.ir.models.encoder import build_encoder_graph
from engine.ir.plan import Capacity, Precision
from engine.native.execution.allocation import CacheShape, allocate
from engine.native.execution.build import (
    STEP_TOKENS,
    TILE_TOKENS,
    check_settings,
    load_model,
    machine_with,
    make_plans,
)
from engine.native.execution.program import add_program
from engine.native.machine import default_threads
from engine.runtime.model_runner import DeviceInfo
from engine.weights.model import ModelSource
from engine.worker.encoder_loop import EncoderSpec, Prompt, finished


class NativeEncoder:
    """`model` is a loaded `Model` of the compiled module. A step has up to `step_tokens` tokens, or
    one longer text.
    """

    def __init__(self, model: Any, config: ModelConfig, step_tokens: int, block_size: int) -> None:
        assert config.encoder is not None, config
        self._model = model
        self._encoder = config.encoder
        self._step_tokens = step_tokens
        self._block_size = block_size
        self._spec = EncoderSpec.of(config)

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    def encode(
        self, prompts: Sequence[Prompt], starts: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        vectors = np.empty((len(prompts), self._spec.num_dimensions), np.float32)
        for rows in _steps([len(prompt) for prompt in prompts], self._step_tokens):
            part = slice(rows.start, rows.stop)
            self._compute(prompts[part], None if starts is None else starts[part])
            for index, row in enumerate(rows):
                self._model.logits(index, vectors[row])
        return finished(vectors, self._encoder)

    def close(self) -> None:
        """Frees the weights. The encoder cannot be used afterwards."""
        del self._model

    def _compute(self, prompts: Sequence[Prompt], starts: Sequence[int] | None) -> None:
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        firsts = ends - lengths
        row_of = np.repeat(np.arange(len(prompts)), lengths)
        positions = np.arange(ends[-1], dtype=np.int32) - firsts[row_of]
        counts = -(-lengths // self._block_size)  # blocks of each text
        first_blocks = np.cumsum(counts) - counts
        tables = first_blocks[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        types = None
        if starts is not None and self._encoder.num_token_types > 1:
            begin = np.array(starts, np.int32)[row_of]
            types = ((begin > 0) & (positions >= begin)).astype(np.int32)
        no_groups = np.full(len(prompts), -1, np.int32)
        self._model.forward(
            np.fromiter((token for prompt in prompts for token in prompt), np.int32, ends[-1]),
            positions,
            (first_blocks[row_of] * self._block_size + positions).astype(np.int64),
            np.concatenate(([0], ends)).astype(np.int32),
            lengths,
            tables.astype(np.int32),
            firsts if self._encoder.pooling == "cls" else ends - 1,
            no_groups,
            np.empty(0, np.int32),
            np.empty(len(prompts), np.uint8),
            visible_end=lengths[row_of],
            token_types=types,
        )


def load_encoder(source: ModelSource, options: EngineOptions, device: DeviceInfo) -> NativeEncoder:
    """Loads a text encoder. Its keys and values stay float32, since they are never kept."""
    config = source.config
    assert config.encoder is not None, config
    check_settings(options.attention, options.quantization)
    max_tokens = max(config.encoder.max_tokens, STEP_TOKENS)
    plans = make_plans(
        build_encoder_graph(config),
        source,
        machine_with(options.threads or default_threads()),
        Capacity(max_tokens, STEP_TOKENS),
        Precision(device.dtype == "float32", "float32"),
    )
    model = load_model(source, plans, ((0, 0),), options.numerics, options.affinity)
    num_blocks = max_tokens // TILE_TOKENS + STEP_TOKENS  # each text may have a partial block
    cache = CacheShape("float32", TILE_TOKENS, ((1, num_blocks),))
    allocate(model.native, source, plans[-1], cache, max_tokens)
    for plan in plans:
        add_program(model.native, plan, model.weights)
    return NativeEncoder(model.native, config, STEP_TOKENS, TILE_TOKENS)


def _steps(lengths: Sequence[int], max_tokens: int) -> Iterator[range]:
    """Splits texts into steps of up to `max_tokens` tokens. A longer text has its own step."""
    begin, total = 0, 0
    for index, length in enumerate(lengths):
        if index > begin and total + length > max_tokens:
            yield range(begin, index)
            begin, total = index, 0
        total += length
    if lengths:
        yield range(begin, len(lengths))
