"""Qwen3: Llama's block with a norm on each query and key head (`ModelConfig.qk_norm`)."""

from engine.backends.custom.frameworks.tinygrad.models import llama

FAMILY = llama.FAMILY
