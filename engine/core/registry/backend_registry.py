"""Backends by name: the values of `--backend NAME`.

A package adds one with an entry point in the group `engine.backends` whose value is its
`InferenceBackend` class, as "module:ClassName".
"""

from typing import Any

from engine.core.registry.registry import Registry

_BACKENDS = Registry(
    kind="backend",
    builtin={
        "native": "engine.backends.custom.frameworks.backends:NativeBackend",
        "tinygrad": "engine.backends.custom.frameworks.backends:TinygradBackend",
        "torch": "engine.backends.custom.frameworks.backends:TorchBackend",
        "jax": "engine.backends.custom.frameworks.backends:JAXBackend",
        "vllm": "engine.backends.vllm:VLLMBackend",
        "sglang": "engine.backends.sglang:SGLangBackend",
        "openai": "engine.backends.openai:OpenAIBackend",
        "transformers": "engine.backends.transformers:TransformersBackend",
    },
    group="engine.backends",
)


def backend_names() -> tuple[str, ...]:
    return _BACKENDS.names()


def backend_class(name: str) -> Any:
    """The backend's class. Importing it may load its framework."""
    return _BACKENDS.load(name)
