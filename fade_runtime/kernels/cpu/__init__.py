"""The CPU kernel: C (attend.c and what it includes), compiled by the machine's own compiler, called through ctypes.

May import storage and the reference kernel. Never in here: Triton, and a C library that is not checked before it is
loaded.
"""

from fade_runtime.kernels.cpu.attention import attend, self_test
from fade_runtime.kernels.cpu.library import build, load

__all__ = ["attend", "build", "load", "self_test"]
