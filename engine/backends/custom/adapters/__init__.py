"""LoRA adapters: reads PEFT folders and GGUF files, and gives adapters places on a device."""
