"""Ops with several implementations: PyTorch reference, Triton, CUDA; `base.py` chooses."""
