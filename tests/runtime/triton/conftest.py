"""Triton's interpreter and its compiler each need a process of their own: `make test-kernels` starts both.

Kernels are interpreted or compiled from the moment that triton is imported, so that an ordinary run of the tests
collects nothing here.
"""

import os

KINDS = {
    "interpreted": ["test_attend.py", "test_pack.py", "test_cache.py", "test_bench.py"],
    "compiled": ["test_compiled.py"],
}
asked = os.environ.get("FADE_TEST_KERNELS", "")
if asked == "interpreted":
    os.environ["TRITON_INTERPRET"] = "1"
collect_ignore = [name for kind, names in KINDS.items() if kind != asked for name in names]
