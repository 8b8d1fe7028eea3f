"""Kernels over the storage format; ``reference`` is the plain torch form of each, with the same signature."""
