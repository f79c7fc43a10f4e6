"""Samplers that work on the host, for parameters that no device sampler supports."""
