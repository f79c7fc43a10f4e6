"""The decoder over tinygrad tensors, and how its weights are loaded."""
