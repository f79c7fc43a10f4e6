"""The native CPU framework: kernels in C++ that keep weights quantized. Needs no tensor library."""
