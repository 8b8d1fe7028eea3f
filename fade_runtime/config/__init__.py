"""What the user may choose, and how a target in bytes becomes budgets.

May import policies and storage, to name and check what they offer. Never in here: tensors of tokens, layers, models.
"""

from fade_runtime.config.config import PRESETS, FadeConfig
from fade_runtime.config.memory_target import MemoryController, target_bytes

__all__ = ["PRESETS", "FadeConfig", "MemoryController", "target_bytes"]
