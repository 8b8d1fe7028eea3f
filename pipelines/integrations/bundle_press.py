"""A press of kvpress that keeps what a bundle would keep, so that kvpress's own evaluation can run our predictors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fade_runtime import FadeConfig, Tier
from fade_runtime.layer.planner import row_budgets
from fade_runtime.policies.base import Prompt
from fade_runtime.policies.learned import Learned
from fade_runtime.storage.tiers import plan_tiers
from fade_runtime.transformers_api import text_config
from pipelines.evaluation.peer import MissingPeer
from pipelines.evaluation.peers import under_older_names
from predictor.bundle import Predictor
from predictor.cache_layers import kv_heads, learnable_layers
from predictor.errors import FadeError
from predictor.registry import load_predictor
from predictor.rope import find_rotary, rotate

_missing: ImportError | None = None
try:
    from kvpress import ScorerPress
    from kvpress.utils import compute_n_kept, get_prerope_query_states
except ImportError as error:  # raised when a press is made
    ScorerPress, _missing = object, error

UNMASKED = ("eager", "fade")  # attention functions that kvpress does not reach


class BundlePress(ScorerPress):
    """Keep sinks and recent window, and of the others what the bundle's scorer and head budgets say; nothing is packed.

    Kv heads keep different numbers of tokens, their mean over the layers that can evict
    (:mod:`predictor.cache_layers`) is what ``compression_ratio`` leaves; other layers stay as they are. As in
    kvpress's AdaKV, what a head drops is masked while decoding (``masked_key_indices``), so no memory is freed; without
    head budgets all keep the same number, and tokens really go.

    Args:
        predictor: `models:/NAME@alias`, `models:/NAME/3`, a bundle directory, a name that comes with the package, a hub
            id, or a loaded predictor.
        compression_ratio: kvpress's word: the fraction of all tokens that is dropped.
        head_budgets: give each kv head the budget that the predictor learned for it.
        n_sink, recent_window: as in FadeConfig.

    Raises:
        FadeError: kvpress is not installed, or the ratio is not in [0, 1).
    """

    compression_ratio: float
    policy: Learned
    config: FadeConfig

    def __init__(
        self,
        predictor: str | Path | Predictor,
        compression_ratio: float = 0.0,
        *,
        head_budgets: bool = True,
        n_sink: int = 4,
        recent_window: int = 64,
    ) -> None:
        if _missing is not None:
            raise MissingPeer(f"kvpress cannot be imported ({_missing}); pip install kvpress") from _missing
        if not 0 <= compression_ratio < 1:
            raise FadeError(f"compression_ratio {compression_ratio} is not a share in [0, 1) that is dropped")
        self.compression_ratio = compression_ratio
        self.policy = Learned(load_predictor(predictor), head_budgets)
        self.config = FadeConfig(n_sink=n_sink, recent_window=recent_window)
        self._rotary: Any = None
        self._layers: list[int] = []

    def __repr__(self) -> str:
        """With what tells presses apart in kvpress's tables."""
        return f"BundlePress({self.policy.predictor.name!r}, compression_ratio={self.compression_ratio})"

    def post_init_from_model(self, model: Any) -> None:
        """Hold the bundle to the model.

        Raises:
            FadeError: it is another model's, or the model's attention cannot be masked by kvpress.
        """
        text = text_config(model)
        self._layers = learnable_layers(text)
        self.policy.predictor.check(model)
        self.policy.check(self._layers, kv_heads(text))
        implementation = model.config._attn_implementation
        if implementation in UNMASKED:
            raise FadeError(
                f"kvpress cannot mask kv heads under attention {implementation!r}; "
                "call model.set_attn_implementation('sdpa') first"
            )
        self._rotary = find_rotary(model)

    def forward_hook(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """The hook of kvpress, under the names that it knows: ``with press(model)`` works on any transformers."""
        if module.layer_idx not in self._layers:  # kvpress itself knows windows of Gemma3ForConditionalGeneration only
            return output
        return super().forward_hook(module, args, under_older_names(module, kwargs), output)

    def score(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Any,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Scores [B, H, S] float32 of a prompt, higher = keep; the largest number for sinks and window."""

        def table(count: int) -> Any:
            slots = torch.arange(count, device=keys.device)
            return None if self._rotary is None else self._rotary.table(slots, module.layer_idx)

        length = keys.shape[2]
        queries = rotate(get_prerope_query_states(module, hidden_states), table(length))
        slots = torch.arange(length, device=keys.device)
        facts: Any = dict(scaling=float(module.scaling), table=table, layer=module.layer_idx)
        facts["sinks"] = getattr(module, "sinks", None)
        prompts = [Prompt(*tokens, **facts) for tokens in zip(queries, keys, values)]
        stats = [self.policy.start(prompt) for prompt in prompts]
        scores = torch.stack([self.policy.score(each, slots, length, length) for each in stats])
        scores[..., : self.config.n_sink] = torch.finfo(scores.dtype).max
        scores[..., length - self.config.recent_window :] = torch.finfo(scores.dtype).max
        return scores

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, kept, D], or all of them with what is dropped left to kvpress's mask."""
        batch, heads, length, dim = keys.shape
        first, last = self.config.n_sink, length - self.config.recent_window
        budget = self._budget(length)
        if self.compression_ratio == 0 or budget >= last - first:
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)[..., first:last]
        rows = torch.arange(batch * heads, device=keys.device).repeat_interleave(last - first)
        budgets = row_budgets(
            self.config.with_options(int4_budget=budget),
            self.policy,
            module.layer_idx,
            torch.full((batch,), length, device=keys.device),
            heads,
        )
        plan = plan_tiers(scores.flatten(), rows, budgets)
        kept = torch.ones(batch, heads, length, dtype=torch.bool, device=keys.device)
        kept[..., first:last] = (plan.tiers != Tier.EVICTED).view(batch, heads, -1)
        if self.policy.budgets is None:  # in every layer, or layers would differ in length from one mask
            return keys[kept].view(batch, heads, -1, dim), values[kept].view(batch, heads, -1, dim)
        module.masked_key_indices = torch.nonzero(~kept, as_tuple=True)
        return keys, values

    def _budget(self, length: int) -> int:
        """Body tokens per kv head that the ratio leaves beside sinks and window."""
        exact = self.config.n_sink + self.config.recent_window
        budget = compute_n_kept(length, self.compression_ratio) - exact
        if budget < 0:
            warnings.warn(
                f"compression_ratio {self.compression_ratio} of {length} tokens leaves fewer than sinks and window, "
                f"which stay: {min(exact, length)}",
                stacklevel=2,
            )
        return budget if budget >= self.config.n_sink else 0  # a smaller one FadeConfig refuses
