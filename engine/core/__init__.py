"""Shared by all backends and the server. Light libraries only, no framework."""
