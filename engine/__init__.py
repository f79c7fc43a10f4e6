"""Serve language models behind an OpenAI-compatible API, or embed them: `from engine import LLM`.

`LLM` and the other public names are imported on first use. So `import engine` is fast and loads no
framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core.interfaces.request import SamplingParams
    from engine.llm import LLM, InferenceEngine

__version__ = "0.1.0"
__all__ = ["LLM", "InferenceEngine", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "engine.llm",
    "InferenceEngine": "engine.llm",
    "SamplingParams": "engine.core.interfaces.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
