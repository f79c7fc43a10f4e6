"""Hugging Face Transformers as a backend: any architecture it supports, with our frontend."""

from engine.backends.transformers.backend import TransformersBackend, TransformersConfig

__all__ = ["TransformersBackend", "TransformersConfig"]
