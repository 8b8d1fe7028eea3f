"""The guard: measures how far forecasts of attention are off while decoding, and takes evictions back.

May import layer and below. Never in here: the cache as a whole, sessions, the model.
"""

from fade_runtime.guard.guard import Guard, Watch
from fade_runtime.guard.probe import Probe, eviction_kl

__all__ = ["Guard", "Probe", "Watch", "eviction_kl"]
