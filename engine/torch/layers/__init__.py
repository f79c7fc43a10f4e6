"""Layers as PyTorch modules. A layer chooses the kernels that it runs; models do not know them."""
