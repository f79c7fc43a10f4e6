"""Speculative decoding: by lookup, and with a draft model."""
