"""Measurements on a GPU: `gpu.suite` runs everything, `gpu.run` compares with vLLM."""
