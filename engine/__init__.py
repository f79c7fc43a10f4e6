"""Serve language models behind an OpenAI-compatible API, or embed them: `from engine import LLM`.

`LLM` and the other public names are imported on first use. So `import engine` is fast and loads no
framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.library.arguments import EngineArgs
    from engine.library.async_llm import AsyncLLM
    from engine.library.openai_format import InferenceEngine
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
    from engine.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "InferenceEngine",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.library.async_llm",
    "BeamSearchParams": "engine.sampling_params",
    "CompletionOutput": "engine.outputs",
    "EmbeddingRequestOutput": "engine.outputs",
    "EngineArgs": "engine.library.arguments",
    "InferenceEngine": "engine.library.openai_format",
    "RequestOutput": "engine.outputs",
    "RequestOutputKind": "engine.sampling_params",
    "SamplingParams": "engine.sampling_params",
    "StructuredOutputsParams": "engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
