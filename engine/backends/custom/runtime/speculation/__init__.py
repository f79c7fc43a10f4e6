"""Speculative decoding without a second model."""
