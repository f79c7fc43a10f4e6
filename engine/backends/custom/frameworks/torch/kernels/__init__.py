"""Ops that have a PyTorch reference and Triton or CUDA kernels. `base.py` chooses between them."""
