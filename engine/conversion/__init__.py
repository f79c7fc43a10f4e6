"""Converts models between file formats: Hugging Face safetensors, GGUF and llama2.c.

A model of any format is opened as a `ModelSource`. Its tensors are converted while they are
written, a few megabytes at a time.
"""
