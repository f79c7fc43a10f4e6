"""Layers over tinygrad tensors."""
