"""Triton kernels for the ops of `kernels`. A module is imported when its kernels are first used."""
