"""A model's weights in the kernels' packed form: packed once, then mapped from disk."""
