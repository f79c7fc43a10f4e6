"""The decoder and the encoder as PyTorch modules, and the loading of weights, also quantized."""
