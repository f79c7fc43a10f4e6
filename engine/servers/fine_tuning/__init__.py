"""/v1/fine_tuning/jobs: trains LoRA adapters in the background and serves them."""
