"""SGLang as a supervised child process."""

from engine.backends.sglang.backend import SGLangBackend
from engine.backends.sglang.config import SGLangConfig

__all__ = ["SGLangBackend", "SGLangConfig"]
