"""GPU memory that an engine leaves free, because fine-tuning jobs train on the same GPU."""

from engine.architectures.base import ModelConfig
from engine.core.errors import ResourceError
from engine.ipc.options import MIB, EngineOptions

# A training step computes at most this many tokens at once, padding included. It does not depend on
# the device, so that adapters don't.
MICRO_BATCH_TOKENS = 2048
_CONTEXT_BYTES = 1024 * MIB  # CUDA's own, the optimizer's state and gaps between tensors


def training_bytes(config: ModelConfig) -> int:
    """GPU memory with which an adapter of the usual rank is trained at full speed. With less, steps
    are computed in smaller parts.
    """
    # Per token and layer, what the backward pass needs: the adapter's inputs as float32, all else
    # as bfloat16.
    inner = 40 * config.hidden_size + 10 * config.intermediate_size
    logits = 16 * config.vocab_size
    activations = MICRO_BATCH_TOKENS * (config.num_layers * inner + logits)
    return 2 * config.num_params + activations + _CONTEXT_BYTES


def room_for_training(
    config: ModelConfig, options: EngineOptions, device: str, room_bytes: int
) -> int:
    """Bytes that the engine leaves free on its device. `room_bytes` is what its weights leave it. 0
    if jobs train elsewhere.
    """
    if _numbered(options.training_device) != _numbered(device):
        return 0
    if options.training_bytes is None:
        return max(0, min(training_bytes(config), room_bytes // 2))
    if options.training_bytes >= room_bytes:
        raise ResourceError(
            f"finetuning.memory_mb is {options.training_bytes / MIB:,.0f}, and the weights leave "
            f"{max(0, room_bytes) / MIB:,.0f} MiB of {device} for training and requests; lower it, "
            "or set finetuning.device to cpu"
        )
    return options.training_bytes


def _numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device
