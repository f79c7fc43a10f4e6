"""The decoder in tinygrad, and the code that loads its weights."""
