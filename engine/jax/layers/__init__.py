"""Layers as pure functions over arrays."""
