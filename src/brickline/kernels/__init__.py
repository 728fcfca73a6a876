"""The kernels that ship, each one source for CPU and CUDA.

A kernel is a C++ file here, written against ``brickline/kernel.h``, and a function in `catalog`
that declares it for given dtypes: signature, launch shape, estimates, and the same computation in
NumPy. The file opens with the formula and how the work is shared out.
"""
