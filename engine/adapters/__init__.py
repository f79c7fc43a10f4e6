"""LoRA adapters: reads PEFT folders and GGUF files, and fits them to a model."""
