"""Runs plugins around a backend. This package is only loaded if a plugin is configured."""
