"""Qwen2 and Qwen2.5: Llama's block, whose query, key and value have biases in the checkpoint."""

from engine.backends.custom.frameworks.tinygrad.models import llama

FAMILY = llama.FAMILY
