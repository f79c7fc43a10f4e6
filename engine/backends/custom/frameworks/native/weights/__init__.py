"""A model's weights as the kernels read them: packed once, mapped from disk afterwards."""
