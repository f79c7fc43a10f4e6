"""Figures about files, requests and callers that mean harm."""
