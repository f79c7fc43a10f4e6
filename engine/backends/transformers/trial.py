"""Two test prompts that compare a runner with the model's own forward pass."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.custom.runtime.model_runner import BatchInputs, ModelRunner
from engine.backends.transformers.slot_runner import find_cache

# Relative L2 error of the logits. 16-bit types round differently by shape.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens start .. end - 1 of one prompt."""

    prompt: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trial:
    """The prompts, and the logits of the model's own forward pass."""

    prompts: tuple[Tensor, ...]  # (P,) each
    logits: tuple[Tensor, ...]  # (P, V) float32 each
    tolerance: float

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, num_tokens: int) -> "Trial":
        size = model.config.get_text_config().vocab_size
        ids = np.random.default_rng(0).integers(0, size, (2, num_tokens))
        prompts = tuple(torch.from_numpy(ids).to(model.device))
        logits = tuple(
            model(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in prompts
        )
        return cls(prompts, logits, TOLERANCES[model.dtype])

    @torch.inference_mode()
    def cache_bytes_per_token(self, model: Any) -> int:
        """Growth of the model's own cache, in bytes per token."""
        prompt = self.prompts[0]
        sizes = [
            _num_bytes(find_cache(model(input_ids=prompt[None, :end], use_cache=True))[1])
            for end in (1, len(prompt))
        ]
        return (sizes[1] - sizes[0]) // max(1, len(prompt) - 1)

    def error(self, runner: ModelRunner) -> float:
        """A runner's error against these logits: one prompt in three chunks, the other in two
        beside it.
        """
        last = len(self.prompts[0]) - 1
        half = last // 2
        steps = (
            (Part(0, 0, half), Part(1, 0, last)),
            (Part(0, half, last), Part(1, last, last + 1)),
            (Part(0, last, last + 1),),
        )
        errors = []
        for step in steps:
            parts = [part for part in step if part.end > part.start]
            logits = runner.forward(self._inputs(parts, runner.spec.block_size)).logits
            assert logits is not None
            for part, given in zip(parts, logits, strict=True):
                expected = self.logits[part.prompt][part.end - 1]
                errors.append(float((given - expected).norm() / expected.norm()))
        return float(np.max(errors))  # NaN if any is NaN

    def _inputs(self, parts: list[Part], block_size: int) -> BatchInputs:
        """A step whose rows each request the logits of their last token. Prompts are laid out
        consecutively from block 1.
        """
        width = -(-len(self.prompts[0]) // block_size)
        tables = 1 + np.arange(len(self.prompts) * width, dtype=np.int32).reshape(-1, width)
        owners = np.array([part.prompt for part in parts], np.int32)
        lengths = [part.end - part.start for part in parts]
        ends = np.cumsum(lengths, dtype=np.int32)
        positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
        blocks = tables[np.repeat(owners, lengths), positions // block_size]
        tokens = [self.prompts[part.prompt][part.start : part.end].cpu() for part in parts]
        num_rows = len(parts)
        return BatchInputs(
            token_ids=torch.cat(tokens).numpy().astype(np.int32),
            positions=positions.astype(np.int32),
            write_slots=blocks.astype(np.int64) * block_size + positions % block_size,
            query_start=np.concatenate(([0], ends)).astype(np.int32),
            seq_lens=np.array([part.end for part in parts], np.int32),
            num_prompt=np.array([part.end for part in parts], np.int32),
            block_tables=tables[owners],
            slots=owners,
            logit_rows=ends - 1,
            adapter_ids=np.zeros(num_rows, np.int32),
            prefix_groups=np.full(num_rows, -1, np.int32),
            prefix_blocks=np.zeros(0, np.int32),
        )


def _num_bytes(cache: Any, seen: frozenset[int] = frozenset()) -> int:
    """Bytes of the tensors in a cache of any class."""
    if isinstance(cache, Tensor):
        return cache.nbytes
    if isinstance(cache, dict):
        parts = list(cache.values())
    elif isinstance(cache, list | tuple):
        parts = list(cache)
    elif hasattr(cache, "__dict__") and id(cache) not in seen:
        parts = list(vars(cache).values())
    else:
        return 0
    inner = seen | {id(cache)}
    return sum(_num_bytes(part, inner) for part in parts)
