"""Ops with a PyTorch reference and a Triton or CUDA kernel. `base.py` chooses which one runs."""
