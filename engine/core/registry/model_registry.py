"""Model families by name, and by their names in `config.json` and in GGUF.

A family is a module with the functions of `Architecture` (backends/custom/architectures/base.py). A
package adds one with an entry point in the group `engine.architectures`: the name is the family's,
the value is the module. Built-in families come first.
"""

from collections.abc import Sequence
from typing import Any

from engine.core.errors import ModelFormatError
from engine.core.registry.registry import Registry

_FOLDER = "engine.backends.custom.architectures"
_ARCHITECTURES = Registry(
    kind="architecture",
    builtin={name: f"{_FOLDER}.{name}" for name in ("llama", "gpt2", "qwen2", "qwen3", "bert")},
    group="engine.architectures",
)


def architecture_names() -> tuple[str, ...]:
    return _ARCHITECTURES.names()


def architecture(name: str) -> Any:
    """The family's module, by its registry name (`ModelConfig.family`)."""
    return _ARCHITECTURES.load(name)


def architecture_for_hf(names: Sequence[str]) -> Any:
    """The family of a checkpoint whose config.json lists `names` under "architectures"."""
    for _, module in _ARCHITECTURES.load_all():
        if not set(names).isdisjoint(module.HF_NAMES):
            return module
    supported = [name for _, module in _ARCHITECTURES.load_all() for name in module.HF_NAMES]
    raise ModelFormatError(
        f"config.json: architecture {', '.join(names) or 'not stated'} is not supported "
        f"(supported: {', '.join(supported)})"
    )


def architecture_for_gguf(name: str) -> Any:
    """The family of a GGUF file whose general.architecture is `name`."""
    for _, module in _ARCHITECTURES.load_all():
        if name in module.GGUF_NAMES:
            return module
    supported = [known for _, module in _ARCHITECTURES.load_all() for known in module.GGUF_NAMES]
    raise ModelFormatError(
        f"GGUF architecture '{name}' is not supported (supported: {', '.join(supported)})"
    )
