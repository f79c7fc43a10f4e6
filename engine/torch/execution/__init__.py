"""The PyTorch model runners, sampling, and the text encoder. On a GPU, steps run as CUDA graphs. On
a CPU, they run eagerly.
"""
