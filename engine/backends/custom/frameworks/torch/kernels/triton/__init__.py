"""Triton code, one file for each operation of `kernels`; imported when a tensor first needs it."""
