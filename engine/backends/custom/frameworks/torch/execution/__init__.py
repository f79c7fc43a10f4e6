"""The PyTorch model runners (CUDA graphs on a GPU, eager on a CPU), sampling, and the encoder."""
