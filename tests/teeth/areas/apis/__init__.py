"""Mutations of the HTTP APIs and of the page."""
