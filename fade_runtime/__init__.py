"""A tiered quantised KV cache for Hugging Face models.

Packages, each may import those after it: cache, guard, layer, config, policies | kernels, storage; then the two modules
transformers_api and events. Never in here: lightning, mlflow (the registry of predictor asks for it), datasets.
"""

from fade_runtime.cache import (
    JsonlExporter,
    ListExporter,
    TieredCache,
    attach_telemetry,
    create_tiered_cache,
    detach_telemetry,
    load_session,
    save_session,
)
from fade_runtime.config import FadeConfig
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
