"""Loads the draft model of an engine: checks that it suits the model, plans its memory, and builds
its runner. The memory plan of the model leaves room for it.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import ConfigError, ResourceError
from engine.core.memory import MIB
from engine.core.store.model_store import resolve_model
from engine.ipc.options import EngineOptions
from engine.runners.entry import framework_entry
from engine.runtime.model_runner import DeviceInfo, RunnerConfig
from engine.runtime.speculation.draft_model import DraftModel
from engine.weights.model import ModelSource, open_model
from engine.worker.encoder_loop import is_encoder
from engine.worker.memory import WORKSPACE_BYTES

log = logging.getLogger(__name__)

FRAMEWORKS = ("native", "torch")
# The draft model guesses for at most this many sequences at the same time. With more, a token of a
# step costs so much that guesses hardly pay.
MAX_SLOTS = 16
STEP_TOKENS = 2048  # max tokens per step of the draft model
# The KV cache of the draft model takes at most this share of the memory that weights leave free.
POOL_SHARE = 0.05
# Options of the model that do not concern the draft model.
_PLAIN: dict[str, Any] = {"kv_dtype": "auto", "numerics": "auto", "quantization": "auto"}
MIN_TOKENS = 128  # with a smaller KV cache, the draft model would be of no use


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model that is not loaded yet, and the memory that it gets."""

    source: ModelSource
    weight_bytes: int
    token_bytes: int  # bytes of keys and values per token
    workspace_bytes: int
    block_size: int
    num_blocks: int  # including the null block
    max_slots: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens that fit the KV cache."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_bytes(self) -> int:
        pool_bytes = self.num_blocks * self.block_size * self.token_bytes
        return self.weight_bytes + pool_bytes + self.workspace_bytes

    def load(self, framework: str, config: RunnerConfig) -> DraftModel:
        """Load the draft model beside a model that was loaded with `config`."""
        log.info(
            "memory plan: draft model %s, weights %s MiB, KV cache of %s tokens",
            self.source.path.name,
            f"{self.weight_bytes / MIB:,.0f}",
            f"{self.num_tokens:,}",
        )
        own = replace(
            config,
            num_blocks=self.num_blocks,
            num_window_blocks=0,
            num_checkpoints=0,
            max_slots=self.max_slots,
            max_seq_len=self.max_seq_len,
            max_batch_tokens=min(config.max_batch_tokens, STEP_TOKENS),
            **_PLAIN,
        )
        model = DraftModel(
            framework_entry(framework).build_runner(self.source, own), own.max_batch_tokens
        )
        model.warm()
        return model


def plan_draft(source: ModelSource, options: EngineOptions) -> DraftPlan:
    """Open the draft model that the options name, and plan its memory. `source` is the model that
    verifies its guesses. Raises an error that says why, if the two do not go together.
    """
    _check_options(options)
    path = resolve_model(options.draft_model)
    draft = open_model(path, use_mmap=options.use_mmap)
    _check_models(source, draft)
    check_vocabulary(Path(options.model_path), path)
    framework = framework_entry(options.framework)
    device: DeviceInfo = framework.find_device(options.device, options.dtype)
    needs = framework.memory_needs(draft, msgspec.structs.replace(options, **_PLAIN), device)
    weight_bytes, token_bytes = needs.weight_bytes, needs.token_bytes
    free_bytes = device.free_bytes - weight_bytes
    free_bytes -= framework.memory_needs(source, options, device).weight_bytes
    max_slots = min(options.max_slots, MAX_SLOTS)
    longest = min(
        options.max_seq_len or source.config.max_position,
        source.config.max_position,
        draft.config.max_position,
    )
    block_bytes = options.block_size * token_bytes
    wanted = max_slots * -(-longest // options.block_size)
    num_blocks = min(wanted, int(POOL_SHARE * free_bytes) // block_bytes)
    num_tokens = num_blocks * options.block_size
    if num_tokens < min(longest, MIN_TOKENS):
        raise ResourceError(
            f"the draft model needs {weight_bytes / MIB:,.0f} MiB for weights, which leaves too "
            "little memory for its KV cache; use a smaller one, or none"
        )
    return DraftPlan(
        source=draft,
        weight_bytes=weight_bytes,
        token_bytes=token_bytes,
        workspace_bytes=WORKSPACE_BYTES if device.name.startswith("cuda") else 0,
        block_size=options.block_size,
        num_blocks=num_blocks + 1,
        max_slots=max_slots,
        max_seq_len=min(longest, num_tokens),
    )


def _check_options(options: EngineOptions) -> None:
    if options.framework not in FRAMEWORKS:
        raise ConfigError(
            f"model.draft_model: --backend {options.framework} can't verify guessed tokens; use "
            f"--backend {' or --backend '.join(FRAMEWORKS)}, or leave it out"
        )
    if options.speculation == "off":
        raise ConfigError(
            'model.draft_model and performance.speculation = "off" contradict each other; leave '
            "one of the two out"
        )
    if options.num_ranks > 1:
        raise ConfigError(
            "model.draft_model does not go together with tensor_parallel_size and "
            "pipeline_parallel_size; leave it out"
        )


def _check_models(source: ModelSource, draft: ModelSource) -> None:
    name = draft.path.name
    if is_encoder(draft.config):
        raise ConfigError(f"model.draft_model: {name} is a text encoder, which guesses no tokens")
    for each in (source, draft):
        if each.config.state is not None:
            raise ConfigError(
                f"model.draft_model: layers of {each.path.name} keep a state, from which rejected "
                "tokens cannot be removed; leave it out"
            )


def check_vocabulary(model: Path, draft: Path) -> None:
    """Raise an error if the two models differ in the text of a token."""
    # Imported here, because few engine processes need a tokenizer.
    from engine.frontend.text_model import load_text

    ours, theirs = (load_text(path).vocabulary().tokens for path in (model, draft))
    shared = min(len(ours), len(theirs))
    # Embedding tables may have different numbers of rows that belong to no token.
    added = next((each for each in (*ours[shared:], *theirs[shared:]) if each), None)
    differs = next((index for index in range(shared) if ours[index] != theirs[index]), None)
    if differs is None and added is None:
        return
    said = "one of the two has more tokens"
    if differs is not None:
        texts = (each[differs].decode(errors="replace") for each in (ours, theirs))
        said = f"token {differs} is %r in one and %r in the other" % tuple(texts)
    raise ConfigError(
        f"model.draft_model: {draft.name} has another vocabulary than {model.name} ({said}); a "
        "draft model needs the same one, which smaller models of the same series have"
    )
