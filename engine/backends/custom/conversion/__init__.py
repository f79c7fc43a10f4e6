"""Conversion of models between file formats: Hugging Face safetensors, GGUF, llama2.c.

Every source is opened as a `ModelSource`, with its tokenizer as GGUF metadata. Every target is a
list of tensors whose bytes are produced while they are written, a few megabytes at a time.
"""
