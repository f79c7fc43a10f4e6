"""Conversion of models between file formats: Hugging Face safetensors, GGUF, llama2.c.

Every source is opened as a `ModelSource`, with its tokenizer as GGUF metadata; every target is a
list of tensors whose bytes are made when they are written, a few megabytes at a time.
"""
