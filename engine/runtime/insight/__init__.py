"""Measures what the engine does, for explanations of requests and for the live view."""
