"""Loads a Transformers model from a local checkpoint, without running the checkpoint's own code.

Model classes are looked up by model type in the installed Transformers. The "Auto" classes are not
used, because they can download and run code of a checkpoint.
"""

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.backends.transformers.checkpoint import HfCheckpoint
from engine.core.errors import (
    ConfigError,
    EngineError,
    ModelError,
    ModelFormatError,
    ResourceError,
)

_NAMED_IN_ERRORS = 3
_MAX_REASON = 300  # characters


def load_model(
    checkpoint: HfCheckpoint, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Load the model to the device. Raises an `EngineError` that says why it failed."""
    try:
        config = _config(checkpoint)
        kind = _model_class(config)
        model, info = kind.from_pretrained(
            checkpoint.folder,
            config=config,
            gguf_file=checkpoint.gguf,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            device_map=None if device.type == "cpu" else {"": device},
            output_loading_info=True,
        )
    except EngineError:
        raise
    except ImportError as error:
        raise ConfigError(f"{checkpoint.folder.name} needs another package: {error}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ResourceError(
            f"{checkpoint.folder.name} does not fit into the memory of {device}"
        ) from error
    except Exception as error:  # a bad configuration can make the library raise anything
        reason = one_line(error)
        if "allocate memory" in reason:  # PyTorch has no class for this error on a CPU
            raise ResourceError(f"{checkpoint.folder.name} does not fit into the memory") from error
        version = transformers.__version__
        raise ModelError(
            f"Transformers {version} cannot load {checkpoint.folder.name}: {reason}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:  # missing weights would have random values
        shown = ", ".join(missing[:_NAMED_IN_ERRORS])
        raise ModelFormatError(
            f"{checkpoint.folder.name} lacks {len(missing)} weights of a {kind.__name__}: {shown}"
        )
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def one_line(error: Exception) -> str:
    """A library's error message, shortened to one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."


def _config(checkpoint: HfCheckpoint) -> Any:
    stated = dict(checkpoint.metadata)
    if checkpoint.gguf is not None:
        stated = load_gguf_checkpoint(str(checkpoint.folder / checkpoint.gguf))["config"]
    name = stated.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        own = ", and code that comes with a model is never run" if "auto_map" in stated else ""
        raise ModelFormatError(
            f"Transformers {transformers.__version__} has no model type {name!r}{own}; "
            "a newer version may"
        )
    kind = CONFIG_MAPPING[name]
    if checkpoint.gguf is not None:
        return kind.from_dict(stated)
    return kind.from_pretrained(checkpoint.folder, local_files_only=True)


def _model_class(config: Any) -> Any:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelFormatError(
            f"a {config.model_type} model writes no text by itself: Transformers has no causal "
            "language model of this type"
        )
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(found, tuple):
        return found
    stated = config.architectures or ()
    return next((kind for kind in found if kind.__name__ in stated), found[0])
