"""Requests on their way to the scheduler: checks, grammars, images, and the new sequences."""
