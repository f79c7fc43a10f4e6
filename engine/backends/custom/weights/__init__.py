"""Checkpoints on disk in GGUF and safetensors format, and their quantization types. Tensor data are
read on first use.
"""
