"""The model to train: a Transformers model with a LoRA adapter by PEFT, and its checkpoints.

Checkpoints are safetensors and JSON. Nothing is pickled.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from engine.adapters.peft import CONFIG_NAME, WEIGHTS_NAME
from engine.backends.transformers.checkpoint import open_checkpoint
from engine.backends.transformers.loading import load_model
from engine.conversion.convert import convert
from engine.core.errors import InvalidRequestError
from engine.finetuning.folder import OPTIMIZER
from engine.finetuning.plan import LoraShape

_STATE = "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def load_for_training(
    path: Path, shape: LoraShape, device: torch.device, seed: int, scratch: Path
) -> Any:
    """The model with a new adapter, whose output is that of the model. A GGUF file is dequantized
    into the folder `scratch` first, which the caller removes.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if path.is_dir() and not any(path.glob("*.gguf")):
        model = load_model(open_checkpoint(path), device, dtype)
    else:
        folder = scratch / "base"
        convert(path, folder, to="safetensors", dtype="F32" if device.type == "cpu" else "BF16")
        model = load_model(open_checkpoint(folder), device, dtype)
    model.name_or_path = str(path)  # not the scratch folder; PEFT writes it down
    model.config.use_cache = False  # of keys and values, which training does not need
    torch.manual_seed(seed)
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,  # type: ignore[arg-type]
        lora_dropout=shape.dropout,
        target_modules=list(shape.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise InvalidRequestError(
            f"the adapter does not fit the model: {error}", param="target_modules"
        ) from None
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter as a PEFT folder."""
    tensors = {
        name: tensor.detach().to("cpu", torch.float32).contiguous()
        for name, tensor in get_peft_model_state_dict(model).items()
    }
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def save_state(
    model: Any, optimizer: torch.optim.Optimizer, facts: dict[str, Any], folder: Path
) -> None:
    """Write all that is needed to continue as if there had been no pause."""
    save_adapter(model, folder)
    tensors = {}
    for name, parameter in trained_parameters(model).items():
        for moment in _MOMENTS:
            found = optimizer.state[parameter].get(moment)
            if found is not None:
                tensors[f"{moment}:{name}"] = found.detach().cpu().contiguous()
    save_file(tensors, folder / OPTIMIZER)
    (folder / _STATE).write_text(json.dumps(facts), encoding="utf-8")


def load_state(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    set_peft_model_state_dict(model, load_file(folder / WEIGHTS_NAME))
    facts: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    tensors = load_file(folder / OPTIMIZER)
    for name, parameter in trained_parameters(model).items():
        moments = {each: tensors[f"{each}:{name}"].to(parameter.device) for each in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(facts["step"])), **moments}
    return facts


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut a batch into parts of at most `max_tokens` padded tokens each, longest first. A part has
    at least one example.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    parts: list[list[int]] = []
    for index in order:
        if not parts or lengths[parts[-1][0]] * (len(parts[-1]) + 1) > max_tokens:
            parts.append([])
        parts[-1].append(index)
    return parts
