"""Operations with several implementations: a PyTorch reference, Triton, CUDA; `base.py` chooses."""
