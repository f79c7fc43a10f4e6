"""CUDA C++ kernels for Hopper GPUs. They are compiled when they are first used."""
