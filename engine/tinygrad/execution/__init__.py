"""The tinygrad model runner. It captures the kernels of steps and replays them."""
