"""A backend that computes with Hugging Face Transformers. It supports all causal language models of
Transformers.
"""

from engine.backends.transformers.backend import TransformersBackend, TransformersConfig

__all__ = ["TransformersBackend", "TransformersConfig"]
