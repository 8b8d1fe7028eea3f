"""The tiered cache: transformers' cache interface over tiered layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from fade_runtime import hf
from fade_runtime.config import FadeConfig
from fade_runtime.layer import TieredLayer
from fade_runtime.policy import POLICIES, Learned, Policy
from predictor.rope import find_rotary

if TYPE_CHECKING:
    from predictor.bundle import Predictor


class TieredCache(Cache):
    """A drop-in cache for ``generate``: ``model.generate(**inputs, past_key_values=cache)``.

    Made by :func:`create_tiered_cache`. Its length is the number of tokens seen; it compresses itself at the end of
    the prompt and then each ``reassign_every`` tokens.
    """

    def __init__(self, layers: list[Any], config: FadeConfig, policy: Policy) -> None:
        super().__init__(layers=layers)
        self.config, self.policy = config, policy

    @property
    def tiered(self) -> list[TieredLayer]:
        """The layers that this cache compresses; the others are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, TieredLayer)]

    def memory_report(self) -> dict[str, Any]:
        """Count what the cache holds now.

        Returns:
            resident_bytes: every tensor that is reachable from the cache, scales, slots, statistics and the
            predictor's weights included; full_bytes: the same tokens in an uncompressed cache of the model's dtype;
            compression: their ratio; tiers: bytes by tier, with "statistics", "predictor" and "other layers";
            tokens: tokens kept per tier, summed over rows and layers; seen: logical tokens.
        """
        tiers = dict.fromkeys(("FP16", "INT4", "statistics", "predictor", "other layers"), 0)
        tokens = {"FP16": 0, "INT4": 0, "EVICTED": 0}
        full_bytes = 0
        for layer in self.tiered:
            if layer.full is None or layer.packed is None or layer.pad is None:
                continue
            full, packed = layer.full, layer.packed
            tiers["FP16"] += _bytes(full.key, full.value, full.slots, layer.pad)
            body = packed.tensors()
            states = [state for state in (full.state, body.pop("state", None)) if state is not None]
            tiers["INT4"] += _bytes(*body.values())
            tiers["statistics"] += _bytes(*states)
            batch, heads, _, dim = full.key.shape
            full_bytes += 2 * batch * heads * layer.seen * dim * full.key.element_size()
            tokens["FP16"] += int((full.slots >= 0).sum()) * heads
            tokens["INT4"] += len(packed)
            tokens["EVICTED"] += layer.evicted
        others = [t for layer in self.layers if not isinstance(layer, TieredLayer) for t in _tensors(layer)]
        tiers["other layers"] = _bytes(*others)
        if isinstance(self.policy, Learned):
            tiers["predictor"] = _bytes(*_reachable(self.policy.predictor))
        resident = sum(tiers.values())
        full_bytes += tiers["other layers"]
        return {
            "resident_bytes": resident,
            "full_bytes": full_bytes,
            "compression": full_bytes / resident if resident else 1.0,
            "tiers": tiers,
            "tokens": tokens,
            "seen": self.get_seq_length(),
        }


def _reachable(predictor: Predictor) -> list[Tensor]:
    budgets = [] if predictor.budgets is None else [predictor.budgets.lost]
    return [*predictor.parameters(), *predictor.buffers(), *budgets]


def _tensors(layer: Any) -> list[Tensor]:
    return [value for value in vars(layer).values() if isinstance(value, Tensor)]


def _bytes(*tensors: Tensor) -> int:
    """Bytes of the storages behind ``tensors``, each once, whether or not a view covers its storage."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def create_tiered_cache(model: nn.Module, config: FadeConfig | None = None) -> TieredCache:
    """Make a cache for a Hugging Face causal language model and switch the model to the "fade" attention.

    Args:
        model: the model that will fill it. Calls without this cache go on as before (plain SDPA).
        config: :class:`FadeConfig`; ``FadeConfig.safe()`` if None.

    Raises:
        FadeError: an architecture that cannot be tiered, or a predictor that is missing, damaged or of another model.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        ...                    vocab_size=8)
        >>> model = LlamaForCausalLM(tiny).eval()
        >>> cache = create_tiered_cache(model, FadeConfig(recent_window=8, int4_budget=16))
        >>> prompt = torch.randint(8, (1, 64))
        >>> _ = model.generate(prompt, past_key_values=cache, max_new_tokens=4, eos_token_id=None)
        >>> cache.get_seq_length(), cache.memory_report()["tokens"]
        (67, {'FP16': 30, 'INT4': 32, 'EVICTED': 72})
    """
    config = FadeConfig.safe() if config is None else config
    policy = POLICIES[config.eviction_policy](config)
    if isinstance(policy, Learned):
        policy.predictor.check(model, strict=config.strict)
    hf.attach(model)
    text = hf.text_config(model)
    rotary = find_rotary(model)
    layers = [
        TieredLayer(config, policy, text, rotary, index) if hf.can_tier(layer) else layer
        for index, layer in enumerate(hf.stock_layers(text))
    ]
    return TieredCache(layers, config, policy)
