"""The GPU kernels, in Triton: fused attention, packing and unpacking, and the table of how they are launched.

May import storage and the reference kernel. Never in here: what a machine without triton needs. This file imports
nothing, since triton is slow to import and not everywhere: take ``attention``, ``pack_kernel`` and ``self_test`` from
their modules; ``launch_table`` alone does without triton.
"""
