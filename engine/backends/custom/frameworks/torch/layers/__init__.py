"""Layers as PyTorch modules; a layer picks its kernel, a model does not."""
