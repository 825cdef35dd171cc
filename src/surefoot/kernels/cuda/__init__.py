"""Kernels in CUDA C++, for tiles that Triton cannot have: its blocks are powers of two."""
