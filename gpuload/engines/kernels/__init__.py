"""The kernels, CUDA C++: compiled for the GPU by CuPy, and for the host by the tests. See `launch.py`."""
