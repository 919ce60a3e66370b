"""The CUDA C++ kernels, each with its host side beside it."""
