"""Any OpenAI-compatible server as a backend."""

from engine.backends.openai.backend import OpenAIBackend
from engine.backends.openai.config import OpenAIConfig

__all__ = ["OpenAIBackend", "OpenAIConfig"]
