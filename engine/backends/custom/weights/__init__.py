"""Checkpoints on disk: GGUF and safetensors, opened lazily, and their quantization formats."""
