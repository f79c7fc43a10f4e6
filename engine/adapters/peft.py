"""Reads LoRA adapters in the format of Hugging Face's PEFT: a folder with `adapter_config.json` and
`adapter_model.safetensors`. What would change the arithmetic in another way is refused by name.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engine.adapters.matrices import StoredAdapter, StoredPair
from engine.architectures.base import Reader
from engine.core.errors import ModelFormatError
from engine.core.store.checkpoint_files import PEFT_FILES
from engine.weights.files import member, read_json
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.safetensors import open_safetensors

CONFIG_NAME, WEIGHTS_NAME = PEFT_FILES
PICKLE_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
# The name of the adapter may be a part of the tensor's name.
_TENSOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(\.default)?(\.weight)?"
)
_COPIES = (".base_layer.weight", ".base_layer.bias")  # copies of the base model's own weights
# Settings that change what an adapter computes, and the values with which they do not.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "ensure_weight_tying": (False, None),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
}
_RESIDUAL_INITS = ("pissa", "olora", "corda", "loftq")  # these change the base model, too


def read_peft(folder: Path) -> StoredAdapter:
    """The matrices of a PEFT folder, under the names of the base model's tensors."""
    where = folder.name
    if not (folder / WEIGHTS_NAME).exists():
        if (folder / PICKLE_NAME).exists():
            raise ModelFormatError(
                f"{where}: {PICKLE_NAME} is a pickle, which can carry code and is never loaded; "
                "save the adapter as safetensors"
            )
        raise ModelFormatError(f"{where} holds no {WEIGHTS_NAME}")
    config = read_json(folder, CONFIG_NAME)
    _check_config(where, config)
    checkpoint = open_safetensors(member(folder, WEIGHTS_NAME))
    try:
        saved = _saved_whole(where, config, checkpoint.tensors)
        found = _by_module(where, checkpoint.tensors, saved.values())
        pairs = tuple(_pair(where, config, module, parts) for module, parts in found.items())
        whole = {name: checkpoint.tensors[each].numpy() for name, each in saved.items()}
        return StoredAdapter(where, "safetensors", pairs, whole=whole)
    finally:
        checkpoint.close()


def _check_config(where: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelFormatError(f"{where}: peft_type is {kind}; only LORA adapters are served")
    for key, harmless in _REFUSED.items():
        if config.get(key) not in harmless:
            name = "DoRA (use_dora)" if key == "use_dora" else f"{key} {config[key]}"
            raise ModelFormatError(
                f"{where}: {name} is not supported; merge the adapter into its base model with PEFT"
            )
    if str(config.get("init_lora_weights")).partition("_")[0].lower() in _RESIDUAL_INITS:
        raise ModelFormatError(
            f"{where}: init_lora_weights {config['init_lora_weights']} changes the base model too; "
            "convert the adapter to plain LoRA with PEFT"
        )


def _saved_whole(
    where: str, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]
) -> dict[str, str]:
    """The tensors of modules that were saved whole, by their names in the base model."""
    modules = config.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(each, str) for each in modules):
        raise ModelFormatError(f"{where}: modules_to_save must be a list of names")
    saved = {}
    for name in tensors:
        # Older versions of PEFT kept the names of their own modules.
        plain = re.sub(r"\.modules_to_save(\.default)?\.", ".", name.removeprefix(_PREFIX))
        module = plain.rpartition(".")[0]
        if any(module == each or module.endswith(f".{each}") for each in modules):
            saved[plain] = name
    for each in modules:
        if not any(f".{name}".rpartition(".")[0].endswith(f".{each}") for name in saved):
            raise ModelFormatError(
                f"{where}: modules_to_save names '{each}', which {WEIGHTS_NAME} does not have"
            )
    return saved


def _by_module(
    where: str, tensors: Mapping[str, LazyTensor], whole: Collection[str]
) -> dict[str, dict[str, LazyTensor]]:
    """The tensors of each module: "A" and "B", or "embedding_A" and "embedding_B"."""
    modules: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(_COPIES) or name in whole:
            continue
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelFormatError(f"{where}: tensor '{name}' is not part of a LoRA adapter")
        kind = match["kind"].removeprefix("lora_")
        modules.setdefault(match["module"].removeprefix(_PREFIX), {})[kind] = tensor
    return modules


def _pair(
    where: str, config: Mapping[str, Any], module: str, parts: Mapping[str, LazyTensor]
) -> StoredPair:
    if parts.keys() not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
        raise ModelFormatError(f"{where}: '{module}' has {', '.join(parts)}, not both matrices")
    if not _is_target(where, config, module):
        raise ModelFormatError(
            f"{where}: there are matrices for '{module}', which target_modules does not name"
        )
    a, b = (parts[kind] for kind in sorted(parts))
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ModelFormatError(f"{where}: the matrices for '{module}' must have two dimensions")
    scale = _scale(where, config, module, a.shape[0])
    return StoredPair(f"{module}.weight", a.numpy(), b.numpy(), scale)


def _scale(where: str, config: Mapping[str, Any], module: str, rank: int) -> float:
    """What b @ a is multiplied by."""
    reader = Reader(config, f"{where}/{CONFIG_NAME}")
    stated = _by_pattern(where, config, "rank_pattern", module, reader.read(int, "r"))
    if stated != rank:
        raise ModelFormatError(
            f"{where}: {CONFIG_NAME} states rank {stated} for '{module}', the matrices have {rank}"
        )
    alpha = reader.read(float, "lora_alpha", default=8.0)
    alpha = float(_by_pattern(where, config, "alpha_pattern", module, alpha))
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / max(rank, 1)
    if not math.isfinite(scale):
        raise ModelFormatError(f"{where}: lora_alpha {alpha} is not a finite number")
    return scale


def _by_pattern(
    where: str, config: Mapping[str, Any], key: str, module: str, default: float
) -> float:
    """The value of the first pattern in `config[key]` that names the module."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelFormatError(f"{where}: {key} must be an object")
    for pattern, value in patterns.items():
        if type(value) not in (int, float):
            raise ModelFormatError(f"{where}: {key} must have numbers as values")
        if _matches(where, rf"(.*\.)?({pattern})", module):
            return float(value)
    return default


def _is_target(where: str, config: Mapping[str, Any], module: str) -> bool:
    targets = config.get("target_modules")
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return _matches(where, targets, module)
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ModelFormatError(f"{where}: target_modules must be a list of names or a pattern")
    if not any(module == each or module.endswith(f".{each}") for each in targets):
        return False
    layers = config.get("layers_to_transform")
    if layers is None:
        return True
    wanted = [layers] if isinstance(layers, int) else layers
    found = re.search(r"\.(\d+)\.", module)
    return isinstance(wanted, list) and found is not None and int(found[1]) in wanted


def _matches(where: str, pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ModelFormatError(f"{where}: pattern {pattern!r} is not valid: {error}") from error
