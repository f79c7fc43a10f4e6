"""The decoder and the encoder as PyTorch modules, and how weights are loaded, also quantized."""
