"""Copies of requests for another model, and how far its answers agree."""
