"""The tinygrad model runner, which captures steps and replays them."""
