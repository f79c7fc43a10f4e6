"""Kernels and model runners, measured without a server."""
