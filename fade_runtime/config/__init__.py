"""What the user may choose, and how a target for the cache's size becomes budgets.

May import policies and storage, to name and check what they offer. Never in here: tensors of tokens, layers, models.
"""

from fade_runtime.config.config import PRESETS, FadeConfig
from fade_runtime.config.memory_target import LayerSize, MemoryController, target_bytes

__all__ = ["PRESETS", "FadeConfig", "LayerSize", "MemoryController", "target_bytes"]
