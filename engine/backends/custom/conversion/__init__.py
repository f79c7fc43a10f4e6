"""Conversion of models between file formats: Hugging Face safetensors, GGUF, llama2.c.

A model of any format is opened as a `ModelSource`, with its tokenizer as GGUF metadata. To write a
model, its tensors are converted while they are written, a few megabytes at a time.
"""
