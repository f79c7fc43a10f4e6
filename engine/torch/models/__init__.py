"""The decoder and the text encoder as PyTorch modules, and the code that loads their weights."""
