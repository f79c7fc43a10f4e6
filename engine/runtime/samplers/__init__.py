"""Samplers that work on the host, for parameters that no device sampler supports, and the logprobs
of prompt tokens.
"""
