"""Hugging Face Transformers as a backend: any architecture that it knows, with our frontend."""

from engine.backends.transformers.backend import TransformersBackend, TransformersConfig

__all__ = ["TransformersBackend", "TransformersConfig"]
