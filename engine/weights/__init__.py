"""Opens checkpoints in GGUF and safetensors format, and converts between their quantization types
and floats. The bytes of a tensor are read on first use.
"""
