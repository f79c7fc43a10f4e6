"""LoRA adapters: reads PEFT folders and GGUF files, fits them to a model, serves them by name."""

VALIDATOR = "engine.adapters.reading:validate_adapter"  # checks the files in a sandboxed process
