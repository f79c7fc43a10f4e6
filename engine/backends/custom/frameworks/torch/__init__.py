"""The PyTorch framework: CUDA first, CPU too.

OpenMP reads its waiting policy once, when PyTorch is first imported. Its default is to spin, and a
kernel thread that spins while another process has the core makes steps tens of times slower.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
