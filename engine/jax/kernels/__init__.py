"""Paged attention for JAX in two versions: XLA operations for all devices, Pallas for GPUs."""
