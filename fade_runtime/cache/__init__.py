"""The tiered cache: transformers' interface over tiered layers, sessions, telemetry, bytes, and the model it is for.

May import everything else in fade_runtime. Never in here: how one layer attends, scores or stores its tokens.
"""

from fade_runtime.cache.factory import create_tiered_cache, load_session
from fade_runtime.cache.session import save_session
from fade_runtime.cache.telemetry import JsonlExporter, ListExporter, attach_telemetry, detach_telemetry
from fade_runtime.cache.tiered_cache import TieredCache

__all__ = [
    "JsonlExporter",
    "ListExporter",
    "TieredCache",
    "attach_telemetry",
    "create_tiered_cache",
    "detach_telemetry",
    "load_session",
    "save_session",
]
