"""Quantized safetensors checkpoints: FP8, compressed-tensors, GPTQ, AWQ, MXFP4, bitsandbytes."""
