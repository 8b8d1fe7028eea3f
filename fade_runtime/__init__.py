"""Policy -> cache -> attention: a tiered quantised KV cache for Hugging Face models."""

from fade_runtime.cache.session import load_session, save_session
from fade_runtime.cache.telemetry import JsonlExporter, ListExporter, attach_telemetry, detach_telemetry
from fade_runtime.cache.tiered_cache import TieredCache, create_tiered_cache
from fade_runtime.config.config import FadeConfig
from fade_runtime.storage.tiers import Tier
from predictor.errors import FadeError

__all__ = [
    "FadeConfig",
    "FadeError",
    "JsonlExporter",
    "ListExporter",
    "Tier",
    "TieredCache",
    "attach_telemetry",
    "create_tiered_cache",
    "detach_telemetry",
    "load_session",
    "save_session",
]
