"""The engine of a GPU: kernels on CuPy arrays; without a GPU, the tests run the same code on NumPy arrays."""
