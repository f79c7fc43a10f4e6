"""vLLM as a supervised child process."""

from engine.backends.vllm.backend import VLLMBackend
from engine.backends.vllm.config import VLLMConfig

__all__ = ["VLLMBackend", "VLLMConfig"]
