"""Implementations that are kept because they are plain."""
