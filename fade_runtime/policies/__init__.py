"""Which tokens are kept: from attention statistics to scores.

May import storage (tiers) and predictor. Never in here: caches, layers, kernels, the API of a model.
"""

from fade_runtime.policies.base import H2O, Adaptive, Ema, Forecast, Policy, ProfiledTokens, Prompt
from fade_runtime.policies.fastgen import FastGen
from fade_runtime.policies.learned import Learned
from fade_runtime.policies.registry import POLICIES

__all__ = ["H2O", "POLICIES", "Adaptive", "Ema", "FastGen", "Forecast", "Learned", "Policy", "ProfiledTokens", "Prompt"]
