"""Which of the vendor's two libraries multiplies the matrices of a step.

Their choices of kernels differ: on an H200, for the matrices of Llama models, cuBLAS is up to 5 %
faster around 256 rows, cuBLASLt up to 13 % with few rows and 2 % with thousands.
"""

import torch

_CUBLAS_ROWS = range(129, 1024)


def prefer_blas(num_rows: int) -> None:
    """For the calls from here on; a graph keeps what it was captured with."""
    if torch.cuda.is_available():
        library = "cublas" if num_rows in _CUBLAS_ROWS else "cublaslt"
        torch.backends.cuda.preferred_blas_library(library)
