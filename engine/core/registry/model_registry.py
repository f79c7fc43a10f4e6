"""The registry of model families. It finds a family by its own name, by the architecture in
`config.json`, or by the architecture in a GGUF file.

A family is a row of data in `architectures`, or any other object with the same
attributes as `Architecture` (in base.py there). A package adds a family with an entry point in the
group `engine.architectures`. The name of the entry point is the family's name. The value is
"module:ROW", or a module that has these attributes itself. Built-in families are searched first.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.core.errors import ModelFormatError
from engine.core.registry.registry import Registry

_FOLDER = "engine.architectures"
_ARCHITECTURES = Registry(
    kind="architecture",
    builtin={
        "llama": f"{_FOLDER}.llama:LLAMA",
        "gpt2": f"{_FOLDER}.layer_norm:GPT2",
        "qwen2": f"{_FOLDER}.llama:QWEN2",
        "qwen3": f"{_FOLDER}.llama:QWEN3",
        "granite": f"{_FOLDER}.llama:GRANITE",
        "minicpm": f"{_FOLDER}.llama:MINICPM",
        "smollm3": f"{_FOLDER}.llama:SMOLLM3",
        "olmo2": f"{_FOLDER}.llama:OLMO2",
        "exaone": f"{_FOLDER}.llama:EXAONE",
        "exaone4": f"{_FOLDER}.llama:EXAONE4",
        "internlm2": f"{_FOLDER}.llama:INTERNLM2",
        "seed_oss": f"{_FOLDER}.llama:SEED_OSS",
        "ernie4_5": f"{_FOLDER}.llama:ERNIE4_5",
        "gemma": f"{_FOLDER}.gemma:GEMMA",
        "gemma2": f"{_FOLDER}.gemma:GEMMA2",
        "gemma3": f"{_FOLDER}.gemma:GEMMA3",
        "phi3": f"{_FOLDER}.fused:PHI3",
        "glm": f"{_FOLDER}.fused:GLM",
        "glm4": f"{_FOLDER}.fused:GLM4",
        "cohere": f"{_FOLDER}.layer_norm:COHERE",
        "cohere2": f"{_FOLDER}.layer_norm:COHERE2",
        "starcoder2": f"{_FOLDER}.layer_norm:STARCODER2",
        "stablelm": f"{_FOLDER}.layer_norm:STABLELM",
        "nemotron": f"{_FOLDER}.layer_norm:NEMOTRON",
        "gpt_neox": f"{_FOLDER}.layer_norm:GPT_NEOX",
        "mpt": f"{_FOLDER}.layer_norm:MPT",
        "qwen2_moe": f"{_FOLDER}.moe:QWEN2_MOE",
        "qwen3_moe": f"{_FOLDER}.moe:QWEN3_MOE",
        "olmoe": f"{_FOLDER}.moe:OLMOE",
        "granitemoe": f"{_FOLDER}.moe:GRANITE_MOE",
        "glm4_moe": f"{_FOLDER}.moe:GLM4_MOE",
        "gpt_oss": f"{_FOLDER}.moe:GPT_OSS",
        "deepseek": f"{_FOLDER}.deepseek:DEEPSEEK",
        "lfm2": f"{_FOLDER}.hybrids.lfm2:LFM2",
        "granitemoehybrid": f"{_FOLDER}.hybrids.mamba:GRANITE_HYBRID",
        "nemotron_h": f"{_FOLDER}.hybrids.mamba:NEMOTRON_H",
        "qwen3_next": f"{_FOLDER}.hybrids.delta:QWEN3_NEXT",
        "bert": f"{_FOLDER}.encoders.bert:BERT",
        "roberta": f"{_FOLDER}.encoders.bert:ROBERTA",
        "nomic_bert": f"{_FOLDER}.encoders.bert:NOMIC_BERT",
        "modernbert": f"{_FOLDER}.encoders.modernbert:MODERN_BERT",
    },
    group="engine.architectures",
)


def architecture_names() -> tuple[str, ...]:
    return _ARCHITECTURES.names()


def architecture(name: str) -> Any:
    """The model family with this name (`ModelConfig.family`)."""
    return _ARCHITECTURES.load(name)


def architecture_for_hf(names: Sequence[str]) -> Any:
    """The family of a checkpoint whose config.json lists `names` under "architectures"."""
    family = find_hf(names)
    if family is None:
        stated = ", ".join(names)
        raise ModelFormatError(
            f"config.json: architecture {stated or 'not stated'} is not supported by the engine's "
            f"own frameworks; {_other_backends(names)}"
        )
    return family


def architecture_for_gguf(name: str) -> Any:
    """The family of a GGUF file whose general.architecture is `name`."""
    family = find_gguf(name)
    if family is None:
        raise ModelFormatError(
            f"GGUF architecture '{name}' is not supported by the engine's own frameworks; serve "
            "the model's Hugging Face folder with --backend transformers or --backend vllm"
        )
    return family


def find_hf(names: Sequence[str]) -> Any | None:
    """The family with one of these names in config.json, or None."""
    families = (family for _, family in _ARCHITECTURES.load_all())
    return next((each for each in families if not set(names).isdisjoint(each.hf_names)), None)


def find_gguf(name: str) -> Any | None:
    """The family with this name in GGUF files, or None."""
    families = (family for _, family in _ARCHITECTURES.load_all())
    return next((each for each in families if name in each.gguf_names), None)


def _other_backends(names: Sequence[str]) -> str:
    """Says which backends may run a model that the engine's own frameworks do not run."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return "serve it with --backend vllm, or with --backend transformers if that is installed"
    # Transformers takes seconds to import, so its list of models is searched as text.
    listed = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    text = listed.read_text() if listed.exists() else ""
    if any(f'"{name}"' in text for name in names):
        return "serve it with --backend transformers or --backend vllm"
    return "the installed Transformers does not know it either; try --backend vllm"
