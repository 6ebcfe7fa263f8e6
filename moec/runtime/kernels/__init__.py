"""The kernels of the run time: torch, C++ and Triton, under the names of one table."""
