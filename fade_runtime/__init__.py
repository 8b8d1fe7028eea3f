"""Policy -> cache -> attention: a tiered quantised KV cache for Hugging Face models."""

from fade_runtime.cache import TieredCache, create_tiered_cache
from fade_runtime.config import FadeConfig
from fade_runtime.tiers import Tier
from predictor.errors import FadeError

__all__ = ["FadeConfig", "FadeError", "Tier", "TieredCache", "create_tiered_cache"]
