"""CUDA C++ kernels for Hopper, compiled on first use."""
