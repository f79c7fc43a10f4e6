"""Kernels in CUDA C++ for Hopper, compiled on first use."""
