"""Paged attention for JAX: in XLA operations everywhere, in Pallas where the device has it."""
