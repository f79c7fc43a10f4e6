"""The tinygrad model runner: captured steps and their replay."""
