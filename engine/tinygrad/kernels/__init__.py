"""Paged attention as tinygrad kernels."""
