"""Chooses how to compute a loaded model. There are three ways: sequences in batches with the paged
KV cache; each sequence alone with the model's own cache; or without any cache.

The model's configuration rules some ways out. A way is tried by computing two sequences in several
steps. It is used if the logits match those of the model's own forward pass.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.transformers.attention import NAME, record
from engine.backends.transformers.checkpoint import HfShape
from engine.backends.transformers.loading import one_line
from engine.backends.transformers.runners import PackedRunner, SlotRunner, find_cache
from engine.backends.transformers.states import FinalStates
from engine.core.errors import ConfigError, ModelError
from engine.ipc.options import EngineOptions
from engine.runtime.model_runner import (
    BatchInputs,
    DeviceInfo,
    ModelRunner,
    RunnerConfig,
)
from engine.torch.execution.cache import KVShape
from engine.worker.loading import log_plan, runner_config
from engine.worker.memory import DTYPE_BYTES, MemoryNeeds, MemoryPlan, plan_memory

# Max relative L2 error of the logits. With 16-bit types, rounding depends on the shapes, so their
# errors are larger.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens start .. end - 1 of one prompt."""

    prompt: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FittingTrial:
    """Two random prompts, and their logits from the model's own forward pass."""

    prompts: tuple[Tensor, ...]  # (P,) each
    logits: tuple[Tensor, ...]  # (P, V) float32 each
    tolerance: float

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, num_tokens: int) -> "FittingTrial":
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
        """The largest error of a runner's logits. The runner computes one prompt in three chunks,
        and in the same steps the other prompt in two chunks.
        """
        last = len(self.prompts[0]) - 1
        half = last // 2
        steps = (
            (PromptPart(0, 0, half), PromptPart(1, 0, last)),
            (PromptPart(0, half, last), PromptPart(1, last, last + 1)),
            (PromptPart(0, last, last + 1),),
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

    def _inputs(self, parts: list[PromptPart], block_size: int) -> BatchInputs:
        """Inputs of a step that computes the logits of each part's last token. The prompts use
        consecutive cache blocks, starting with block 1.
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
    """Bytes of all tensors in a cache, whatever its class."""
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


# RoPE types that depend on the longest sequence in a forward pass. In a batch, a sequence would
# depend on the others.
_CHANGING_ROPES = frozenset({"dynamic", "longrope"})
# Configuration keys that don't prevent paged attention. Layer types and windows already account for
# them.
_KNOWN_LIMITS = frozenset(
    {
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "max_window_layers",
        "chunk_size_feed_forward",
    }
)
# Errors that a model's forward pass may raise if it does not support our arguments.
FORWARD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)


def kv_shape(model: Any, prompt: Tensor) -> KVShape | str:
    """Make the model use our attention. Returns the KV shape of its layers, or why our attention
    can't be used.
    """
    config = model.config.get_text_config()
    reason = _ruled_out(model, config)
    if reason is not None:
        return reason
    model.set_attn_implementation(NAME)
    try:
        calls = record(model, prompt).calls
    except FORWARD_ERRORS as error:
        return f"its attention can't be replaced ({type(error).__name__}: {one_line(error)})"
    if not calls:
        return "its attention can't be replaced"
    layers, facts = [layer for layer, _ in calls], [each for _, each in calls]
    if sorted(layers) != list(range(len(layers))):
        return "its layers share keys and values"
    others = sorted(frozenset[str]().union(*(each.others for each in facts)))
    if others:
        return f"its attention considers {', '.join(others)}"
    if len({(each.num_kv_heads, each.head_dim, each.value_dim) for each in facts}) > 1:
        return "its layers keep keys of different sizes"
    if facts[0].value_dim > facts[0].head_dim:
        return "its values are larger than its keys"
    expected = _windows(config, len(layers))
    if any(each.scoring.window != expected[layer] for layer, each in calls):
        return "its layers do not tell their windows"
    return KVShape(len(layers), facts[0].num_kv_heads, facts[0].head_dim)


def _ruled_out(model: Any, config: Any) -> str | None:
    if model._is_stateful:
        return "it keeps a state that is not one of keys and values"
    if not model._supports_attention_backend:
        return "its attention can't be replaced"
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    if any(each.get("rope_type") in _CHANGING_ROPES for each in ropes):
        return "its rotation depends on the longest sequence"
    for name, value in vars(config).items():
        limits = ("window" in name or "chunk" in name) and name not in _KNOWN_LIMITS
        if limits and type(value) is int:
            return f"its attention is limited by {name}"
    return None


def _windows(config: Any, num_layers: int) -> list[int | None]:
    """The sliding window of each layer, according to the configuration. None: no window."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * num_layers
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


log = logging.getLogger(__name__)

WAYS = ("auto", "paged", "own")
TRIAL_TOKENS = 24  # more than one block, so that block boundaries are tested
# Default size of the KV pool on a CPU. It is enough for most uses, and most machines have it.
USUAL_POOL_BYTES = 2**30
# Share of a GPU's free memory for the KV pool. The rest is for attention, which copies the keys and
# values of one layer.
POOL_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ModelToFit:
    """A model with its weights in memory. `device` has the memory that was free before loading."""

    model: Any
    shape: HfShape
    options: EngineOptions
    device: DeviceInfo

    def plan(self, bytes_per_token: int) -> tuple[RunnerConfig, MemoryPlan]:
        """Plan the use of the memory that is left besides the weights."""
        model, options, device = self.model, self.options, self.device
        weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        needs = MemoryNeeds(weights, bytes_per_token, USUAL_POOL_BYTES)
        if device.name.startswith("cuda"):
            spared = int((1 - options.gpu_memory_utilization) * device.free_bytes)
            workspace = needs.workspace_bytes + spared + self._activation_bytes()
            needs = replace(
                needs, usual_pool_bytes=None, workspace_bytes=workspace, pool_share=POOL_SHARE
            )
        plan = plan_memory(self.shape.max_position, options, device, needs)
        log_plan(device, plan)
        return runner_config(options, device, plan), plan

    def _activation_bytes(self) -> int:
        """Estimated bytes of the activations in the largest step. An MLP is some times as wide as
        the hidden state, so 40 values per hidden unit are assumed.
        """
        states = 40 * self.options.max_batch_tokens * self.shape.hidden_size
        logits = 4 * self.options.max_slots * self.shape.vocab_size
        return states * DTYPE_BYTES[self.device.dtype] + 4 * logits


@dataclass(frozen=True, slots=True)
class Fitted:
    """The chosen runner. `shares` says whether sequences can share cached prefixes."""

    runner: ModelRunner
    config: RunnerConfig
    plan: MemoryPlan
    shares: bool


def fit(loaded: ModelToFit) -> Fitted:
    """Choose how to compute the model, and plan its memory."""
    model, way = loaded.model, loaded.options.attention
    if way not in WAYS:
        raise ConfigError(
            f"attention '{way}' is not known to the transformers backend; "
            f"use one of {', '.join(WAYS)}"
        )
    trial = _trial(loaded)
    states = FinalStates(model)
    reason = "it was asked for"
    if way != "own":
        own = model.config._attn_implementation
        found = _packed(loaded, states, trial)
        if isinstance(found, Fitted):
            log.info("sequences are computed together, over a paged cache")
            return found
        reason = found
        if way == "paged":
            raise ConfigError(f"attention 'paged' does not fit this model: {reason}; use auto")
        model.set_attn_implementation(own)
    log.warning("each sequence is computed by itself, with the model's own cache: %s", reason)
    return _one_by_one(loaded, states, trial)


def _trial(loaded: ModelToFit) -> FittingTrial:
    most = loaded.options.max_seq_len or loaded.shape.max_position
    try:
        return FittingTrial.of(loaded.model, min(TRIAL_TOKENS, most, loaded.shape.max_position))
    except Exception as error:  # after any error, the model can't be used
        log.exception("the model's own forward pass failed")
        kind = type(loaded.model).__name__
        raise ModelError(f"this {kind} cannot compute: {one_line(error)}") from error


def _packed(loaded: ModelToFit, states: FinalStates, trial: FittingTrial) -> Fitted | str:
    """A runner that computes sequences in batches, or why the model does not allow it."""
    kv = kv_shape(loaded.model, trial.prompts[0])
    if isinstance(kv, str):
        return kv
    values = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim
    config, plan = loaded.plan(values * DTYPE_BYTES[loaded.device.dtype])
    runner = PackedRunner(loaded.model, states, loaded.shape.vocab_size, config, kv)
    error = trial.error(runner)
    if error <= trial.tolerance:
        return Fitted(runner, config, plan, shares=True)
    return f"its numbers change by {error:.1e}"


def _one_by_one(loaded: ModelToFit, states: FinalStates, trial: FittingTrial) -> Fitted:
    model, vocab_size = loaded.model, loaded.shape.vocab_size
    try:
        config, plan = loaded.plan(max(1, trial.cache_bytes_per_token(model)))
        runner = SlotRunner(model, states, vocab_size, config)
        error = trial.error(runner)
        if error <= trial.tolerance:
            return Fitted(runner, config, plan, shares=False)
        reason = f"its numbers change by {error:.1e}"
    except FORWARD_ERRORS as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
    log.warning("no cache can be used, every token recomputes its whole sequence: %s", reason)
    config, plan = loaded.plan(bytes_per_token=1)
    runner = SlotRunner(model, states, vocab_size, config, keeps_state=False)
    return Fitted(runner, config, plan, shares=False)
