"""Layers as PyTorch modules. Layers choose the kernels; the models that use them do not."""
