"""The PyTorch model runners (CUDA graphs, and eager for a CPU), sampling, and the encoder."""
