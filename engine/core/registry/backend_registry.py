"""The registry of backends. Their names are the values of `--backend NAME`.

A package adds a backend with an entry point in the group `engine.backends`. The value of the entry
point is the package's `InferenceBackend` class, as "module:ClassName".
"""

from typing import Any

from engine.core.registry.registry import Registry

_BUILTIN = {
    "native": "engine.backends.custom.frameworks:NativeBackend",
    "tinygrad": "engine.backends.custom.frameworks:TinygradBackend",
    "torch": "engine.backends.custom.frameworks:TorchBackend",
    "jax": "engine.backends.custom.frameworks:JAXBackend",
    "vllm": "engine.backends.vllm:VLLMBackend",
    "sglang": "engine.backends.sglang:SGLangBackend",
    "openai": "engine.backends.openai:OpenAIBackend",
    "transformers": "engine.backends.transformers:TransformersBackend",
    "nodes": "engine.routing.nodes.backend:NodesBackend",
}
_BACKENDS = Registry(kind="backend", builtin=_BUILTIN, group="engine.backends")
# Names without those of other packages, which `backend_names` has to search for.
BUILTIN_BACKENDS = tuple(_BUILTIN)


def backend_names() -> tuple[str, ...]:
    return _BACKENDS.names()


def backend_class(name: str) -> Any:
    """Import and return the class of a backend. The import may load a machine learning
    framework.
    """
    return _BACKENDS.load(name)
