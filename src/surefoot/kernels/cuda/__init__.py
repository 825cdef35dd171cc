"""Kernels in CUDA C++ for what Triton cannot say: copies that several multiprocessors share."""
