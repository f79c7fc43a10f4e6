"""The Triton kernels of invariant numerics."""
