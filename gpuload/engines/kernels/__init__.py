"""CUDA C++ sources, compiled by CuPy for a GPU and by a host compiler for tests; see `engines/device/kernels.py`."""
