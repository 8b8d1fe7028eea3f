"""Attention over stored tokens: in C on a CPU, in Triton on a GPU, and in plain torch, which says what both must give.

May import storage and predictor. Never in here: policies, layers, caches. Triton is imported when a GPU is asked for,
never by importing this package.
"""

from fade_runtime.kernels.dispatch import Kernel, kernel_name, pick_kernel, pick_quantiser
from fade_runtime.kernels.reference import Part, decoded, dequantise

__all__ = ["Kernel", "Part", "decoded", "dequantise", "kernel_name", "pick_kernel", "pick_quantiser"]
