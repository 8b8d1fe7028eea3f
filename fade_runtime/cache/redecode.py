"""After a rollback, decode again what was generated while the forecast was failing: ``on_rollback="redecode"``.

`model.generate` then runs in parts: it stops when the guard has brought tokens back, the tokens since the last probe
at which every layer was in order are taken out of the text and of the cache, and it goes on from there. What comes out
is what one call would have given had the tokens come back at that place.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList

from fade_runtime.cache.attach import Hold, changing
from fade_runtime.cache.tiered_cache import TieredCache
from fade_runtime.transformers_api import CACHE_NAMES
from predictor.errors import FadeError

REFUSED = ("streamer", "assistant_model", "prompt_lookup_num_tokens", "custom_generate", "return_dict_in_generate")


class _OnRollback(StoppingCriteria):
    """Stops as soon as the guard asks for tokens to be decoded again."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """One answer for each sequence."""
        stop = self.cache.monitor.redecode_from is not None
        return torch.full((len(input_ids),), stop, dtype=torch.bool, device=input_ids.device)


def attach(model: nn.Module, croppable: bool) -> Hold:
    """Let ``model.generate`` decode again under a cache that asks for it; under any other it is as ever.

    Args:
        model: a causal language model. croppable: whether tokens can be taken out of every layer of its cache.

    Returns:
        a hold on it; ``generate`` is as before when the last one goes.

    Raises:
        FadeError: they cannot.
    """
    if not croppable:
        raise FadeError(
            f"on_rollback 'redecode' cannot take tokens out of the recurrent or sliding layers of "
            f"{type(model).__name__}; use on_rollback='continue'"
        )
    with changing():
        there = vars(model).get("generate")
        hold = there.hold() if isinstance(there, _Generate) else None
        if hold is None:
            hold = Hold(partial(_put_back, weakref.ref(model)))
            before = there.before if isinstance(there, _Generate) else there
            vars(model)["generate"] = _Generate(model, before, hold)
        return hold


def _put_back(which: Callable[[], nn.Module | None]) -> None:
    model = which()
    there = None if model is None else vars(model).get("generate")
    if model is None or not isinstance(there, _Generate) or there.hold() is not None:
        return
    if there.before is None:
        vars(model).pop("generate", None)
    else:
        vars(model)["generate"] = there.before


class _Generate:
    """``generate`` of one model, which it does not keep alive; a copy or a pickle of the model has the one from before.

    Attributes:
        before: what somebody else had put in the place of the class's method, or None. hold: gives the hold on this.
    """

    def __init__(self, model: nn.Module, before: Callable[..., Any] | None, hold: Hold) -> None:
        self._model, self.before, self.hold = weakref.ref(model), before, weakref.ref(hold)

    def __call__(self, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        """As it was before, in parts under a cache that decodes again."""
        model: Any = self._model()
        plain = partial(type(model).generate, model) if self.before is None else self.before
        return _generate(plain, model, inputs, *args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return operator.getitem, ((self.before,), 0)
        return getattr, (self._model(), "generate")


def _generate(plain: Any, model: Any, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
    """``generate`` of a model, in parts under a cache that decodes again."""
    cache = next((options[name] for name in CACHE_NAMES if options.get(name) is not None), None)
    if not isinstance(cache, TieredCache) or cache.config.on_rollback != "redecode":
        return plain(inputs, *args, **options)
    ids = options.pop("input_ids", None) if inputs is None else inputs
    settings = options.get("generation_config") or model.generation_config
    _check(ids, args, options, settings)
    prompt_length = len(ids[0])
    end = _end(prompt_length, options, settings)
    least = prompt_length + (options.pop("min_new_tokens", None) or settings.min_new_tokens or 0)
    mask = options.pop("attention_mask", None)
    criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or []), _OnRollback(cache)])
    cache.monitor.redecodes = True
    while True:
        grown = ids.shape[1] - (0 if mask is None else mask.shape[1])
        mask = torch.ones_like(ids) if mask is None else torch.cat((mask, mask.new_ones(1, grown)), dim=1)
        cache.monitor.redecode_from = None
        left: dict[str, int] = {"max_new_tokens": end - ids.shape[1], "min_new_tokens": max(least - ids.shape[1], 0)}
        out = plain(ids, attention_mask=mask, stopping_criteria=criteria, **left, **options)
        ids, more = taken_back(cache, out, prompt_length)
        mask = mask[:, : ids.shape[1]]
        if not more or ids.shape[1] >= end:
            return ids


def taken_back(cache: TieredCache, ids: Tensor, prompt_length: int) -> tuple[Tensor, bool]:
    """Take what is in doubt out of a text [1, S] and its cache.

    Args:
        cache: whose guard says from where on. ids: [1, S] int64 of the text.
        prompt_length: tokens at the beginning that the user gave; they are read again, not dropped.

    Returns:
        the text that is left; whether to go on from it.
    """
    good = cache.monitor.redecode_from
    cache.monitor.redecode_from = None
    if good is None:
        return ids, False
    seen = cache.get_seq_length()
    drop = min(seen - good, *(layer.seen - layer.final for layer in cache.own))
    if drop > 0:
        cache.crop(-drop)
    return ids[:, : max(seen - drop + 1, prompt_length)], True  # the last one was chosen when all was in order


def _check(ids: Tensor | None, args: Any, options: dict[str, Any], settings: Any) -> None:
    if ids is None or ids.ndim != 2 or len(ids) != 1 or args:
        raise FadeError("on_rollback 'redecode' decodes one sequence of input_ids at a time; use 'continue' for more")
    for name in REFUSED:
        if options.get(name):
            raise FadeError(f"{name} does not go with on_rollback 'redecode', which takes tokens back; leave it out")
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or getattr(settings, name, None) or 1) > 1:
            raise FadeError(f"{name} above 1 does not go with on_rollback 'redecode'; use 'continue'")


def _end(length: int, options: dict[str, Any], settings: Any) -> int:
    """Tokens at which generation ends, by what the caller or the model's settings say."""
    new = options.pop("max_new_tokens", None) or settings.max_new_tokens
    most = options.pop("max_length", None) or settings.max_length
    if new is not None:
        return length + int(new)
    return int(most) if most is not None and most > length else length + 20  # transformers' default
