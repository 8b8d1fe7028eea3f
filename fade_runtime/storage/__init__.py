"""Tokens in their stored forms: tiers, the quantised format, packed and product-quantised tokens, spilled ones.

May import predictor and the API of transformers. Never in here: kernels (what quantises is an argument), policies,
attention.
"""

from fade_runtime.storage.codebook import CodebookSet, load_codebook
from fade_runtime.storage.heap import trim_heap
from fade_runtime.storage.packed import Bits, PackedTokens, Quantised, Quantiser, pack_tokens, quantise
from fade_runtime.storage.pq import LayerCodebook, PQCodebook, PQTokens
from fade_runtime.storage.spill import Spill, SpilledTokens
from fade_runtime.storage.spillfiles import SpillError
from fade_runtime.storage.tiers import Budgets, Tier, TierPlan, plan_tiers
from fade_runtime.storage.tokens import StoredTokens

__all__ = [
    "Bits",
    "Budgets",
    "CodebookSet",
    "LayerCodebook",
    "PQCodebook",
    "PQTokens",
    "PackedTokens",
    "Quantised",
    "Quantiser",
    "Spill",
    "SpillError",
    "SpilledTokens",
    "StoredTokens",
    "Tier",
    "TierPlan",
    "load_codebook",
    "pack_tokens",
    "plan_tiers",
    "quantise",
    "trim_heap",
]
