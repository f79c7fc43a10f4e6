"""Triton kernels, one file per op of `kernels`; imported when a tensor first needs them."""
