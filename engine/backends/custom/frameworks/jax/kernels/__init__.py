"""Paged attention for JAX: XLA operations on every device, Pallas on GPUs."""
