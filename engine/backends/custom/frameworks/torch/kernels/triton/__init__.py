"""Triton kernels for the ops of `kernels`. A module is imported when a kernel of it first runs."""
