"""Simple reference implementations, with which others are compared."""
