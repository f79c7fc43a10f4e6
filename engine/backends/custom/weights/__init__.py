"""Checkpoints on disk: GGUF and safetensors, opened lazily; quantization formats."""
