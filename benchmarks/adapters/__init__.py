"""What LoRA adapters and fine-tuning cost."""
