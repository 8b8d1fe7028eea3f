"""One attention layer of the cache: its tokens by tier, its calls, and who moves what.

May import config, policies, kernels, storage and the API of transformers. Never in here: the guard (it comes as
:class:`LayerHooks`), the cache as a whole, files.
"""

from fade_runtime.layer.attention import AttentionCall, FullTokens
from fade_runtime.layer.compressed_layer import CompressedLayer, LayerHooks
from fade_runtime.layer.layer import TieredLayer
from fade_runtime.layer.setup import LayerSetup
from fade_runtime.layer.store import BodyTokens, TokenStore

__all__ = [
    "AttentionCall",
    "BodyTokens",
    "CompressedLayer",
    "FullTokens",
    "LayerHooks",
    "LayerSetup",
    "TieredLayer",
    "TokenStore",
]
