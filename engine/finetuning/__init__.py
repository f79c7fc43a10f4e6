"""Trains LoRA adapters in a process of its own: data, hyperparameters, the training loop."""
