"""Which way a loaded model can be computed, found by trying: together in one pass over the paged
cache, each sequence by itself with the model's own cache, or with no cache at all.

What a configuration says rules some models out; whoever is left computes two sequences in several
steps, and must get what its own forward pass over each gives.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from engine.backends.custom.frameworks.torch.execution.cache import KVShape
from engine.backends.custom.memory import DTYPE_BYTES, MemoryNeeds, MemoryPlan, plan_memory
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.seam import DeviceInfo, ModelRunner, RunnerConfig
from engine.backends.custom.worker import log_plan, runner_config
from engine.backends.transformers.attention import NAME, record
from engine.backends.transformers.checkpoint import HfShape
from engine.backends.transformers.packed_runner import PackedRunner
from engine.backends.transformers.slot_runner import SlotRunner
from engine.backends.transformers.trial import Trial
from engine.core.errors import ConfigError

log = logging.getLogger(__name__)

WAYS = ("auto", "paged", "own")
TRIAL_TOKENS = 24  # more than a block holds
# A rotation that depends on the longest sequence of a pass would depend on a row's neighbours.
_CHANGING_ROPES = frozenset({"dynamic", "longrope"})
_KNOWN_LIMITS = frozenset({"sliding_window", "max_window_layers", "chunk_size_feed_forward"})
# What a model raises that does not know what it is given.
FORWARD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Fitted:
    """`shares`: whether sequences can share what they have in common."""

    runner: ModelRunner
    config: RunnerConfig
    plan: MemoryPlan
    shares: bool


def fit(model: Any, shape: HfShape, options: EngineOptions, device: DeviceInfo) -> Fitted:
    """Plan the memory beside the loaded weights and choose how to compute. `device` tells what was
    free before they were loaded.
    """
    if options.attention not in WAYS:
        raise ConfigError(
            f"attention '{options.attention}' is not known to the transformers backend; "
            f"use one of {', '.join(WAYS)}"
        )
    own = model.config._attn_implementation
    trial = Trial.of(model, min(TRIAL_TOKENS, options.max_seq_len or shape.max_position))
    reason = "it was asked for"
    if options.attention != "own":
        found = _kv_shape(model, trial)
        if isinstance(found, KVShape):
            fitted = _packed(model, shape, options, device, found)
            error = trial.error(fitted.runner)
            if error <= trial.tolerance:
                log.info("sequences are computed together, over a paged cache")
                return fitted
            found = f"its numbers change by {error:.1e}"
        reason = found
        if options.attention == "paged":
            raise ConfigError(f"attention 'paged' does not fit this model: {reason}; use auto")
        model.set_attn_implementation(own)
    log.warning("each sequence is computed by itself, with the model's own cache: %s", reason)
    return _one_by_one(model, shape, options, device, trial)


def _packed(
    model: Any, shape: HfShape, options: EngineOptions, device: DeviceInfo, kv: KVShape
) -> Fitted:
    per_token = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * DTYPE_BYTES[device.dtype]
    config, plan = _planned(model, shape, options, device, per_token)
    runner = PackedRunner(model, shape.vocab_size, config, kv)
    return Fitted(runner, config, plan, shares=True)


def _one_by_one(
    model: Any, shape: HfShape, options: EngineOptions, device: DeviceInfo, trial: Trial
) -> Fitted:
    try:
        per_token = max(1, trial.cache_bytes_per_token(model))
        config, plan = _planned(model, shape, options, device, per_token)
        runner = SlotRunner(model, shape.vocab_size, config)
        error = trial.error(runner)
        if error <= trial.tolerance:
            return Fitted(runner, config, plan, shares=False)
        reason = f"its numbers change by {error:.1e}"
    except FORWARD_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
    log.warning("no cache is of use, each token computes its whole sequence again: %s", reason)
    config, plan = _planned(model, shape, options, device, per_token=1)
    runner = SlotRunner(model, shape.vocab_size, config, keeps_state=False)
    return Fitted(runner, config, plan, shares=False)


def _planned(
    model: Any, shape: HfShape, options: EngineOptions, device: DeviceInfo, per_token: int
) -> tuple[RunnerConfig, MemoryPlan]:
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    needs = MemoryNeeds(weights, per_token)
    if device.name.startswith("cuda"):
        spared = int((1 - options.gpu_memory_utilization) * device.free_bytes)
        needs = replace(needs, workspace_bytes=needs.workspace_bytes + spared, pool_share=1.0)
    plan = plan_memory(shape.max_position, options, device, needs)
    log_plan(device, plan)
    return runner_config(options, device, plan), plan


def _kv_shape(model: Any, trial: Trial) -> KVShape | str:
    """What each layer keeps of a token, or why our attention can't stand in for the model's."""
    config = model.config.get_text_config()
    reason = _ruled_out(model, config)
    if reason is not None:
        return reason
    model.set_attn_implementation(NAME)
    try:
        calls = record(model, trial.prompts[0]).calls
    except FORWARD_ERRORS as error:
        return f"its attention can't be replaced ({type(error).__name__}: {error})"
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
    if model._is_stateful or not model._supports_attention_backend:
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
    """What the configuration says of each layer's window."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * num_layers
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
