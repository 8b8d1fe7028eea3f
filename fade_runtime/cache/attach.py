"""What caches change about the user's model while there are any, and how it goes back.

Each change is made once for all caches of a model and lasts as long as one of them holds its :class:`Hold`: the
attention implementation in the model's configs, hooks that show calls to caches that ask for it, and `generate` for
caches that decode again (:mod:`fade_runtime.cache.redecode`).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from fade_runtime import transformers_api as hf
from predictor.errors import FadeError

ENCODER = "is an encoder, which has no next token and takes no cache"


class Hold:
    """A change to a model, for as long as somebody holds this; copies of a cache hold the same.

    Args:
        undo: takes the change back unless there is a newer hold on it; it must not refer to this one.
    """

    def __init__(self, undo: Callable[[], None]) -> None:
        weakref.finalize(self, _let_go, undo).atexit = False

    def __deepcopy__(self, memo: object) -> Hold:
        return self


_changing = threading.Lock()
_let_gone: deque[Callable[[], None]] = deque()  # undo what nobody holds any more


@contextmanager
def changing() -> Iterator[None]:
    """While this lasts no other thread changes a model, nor is anything undone."""
    try:
        with _changing:
            yield
    finally:
        _undo()


def _let_go(undo: Callable[[], None]) -> None:
    """Called wherever a hold happens to die, be it while this very thread changes a model: it never waits."""
    _let_gone.append(undo)
    _undo()


def _undo() -> None:
    """Undo what is due, or leave it to the thread that changes something now and looks here when it has."""
    while _let_gone and _changing.acquire(blocking=False):
        try:
            while _let_gone:
                _let_gone.popleft()()
        finally:
            _changing.release()


# -- the attention implementation ---------------------------------------------------------------------------------


class Switched(str):
    """The attention implementation that caches have set in a config; a copy or a pickle of it is the one from before.

    Attributes:
        before: what the config said. hold: gives the hold of this change, as long as there is one.
    """

    before: str | None
    hold: Callable[[], Hold | None]

    def __new__(cls, name: str, before: str | None, hold: Hold) -> Switched:
        """A string like any other."""
        made = super().__new__(cls, name)
        made.before, made.hold = before, weakref.ref(hold)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ()) if self.before is None else (str, (self.before,))


def attach(model: Any) -> list[Hold]:
    """Switch a model to the "fade" attention; anything but a tiered cache still gets the attention it had.

    Returns:
        a hold for each config; when the last one goes, the config is as before, unless somebody else has changed it.

    Raises:
        FadeError: an architecture whose cache cannot be tiered (MLA, recurrent, no attention interface,
            an encoder).
    """
    config = hf.text_config(model)
    reason = _refusal(model, config)
    if reason:
        raise FadeError(f"{config.model_type} {reason}; use transformers' own cache")
    hf.register()
    wanted = hf.implementation(config)
    with changing():
        before = [(each, each._attn_implementation) for each in _configs(model)]
        held = [(each, *_switched(each, wanted)) for each, _ in before]
        mine = next(name for each, name, _ in held if each is config)
        try:
            if not (hf.is_attached(config) and hf.is_attached(model.config)):
                model.set_attn_implementation(mine)
            if not hf.is_attached(config):
                raise FadeError(
                    f"{type(model).__name__} cannot change its attention from {config._attn_implementation!r} to "
                    f"{wanted!r}; " + ("load it with attn_implementation='sdpa'" if wanted == "sdpa"
                                       else "use transformers' own cache")
                )  # fmt: skip
        except BaseException:
            for each, name in before:
                _set(each, name)
            raise
        changed = [(each, now) for each, now in before if each._attn_implementation == wanted]
        kept = [id(each) for each, now in changed if now != wanted or isinstance(now, Switched)]
        for each, name, _ in held:
            if id(each) in kept:
                _set(each, name)
        return [hold for each, _, hold in held if id(each) in kept]


def _switched(config: Any, wanted: str) -> tuple[Switched, Hold]:
    """What a config is to say, and the hold on it: those that are there, or new ones."""
    now = config._attn_implementation
    if isinstance(now, Switched) and (hold := now.hold()) is not None:
        return now, hold
    hold = Hold(partial(_put_back, weakref.ref(config)))
    return Switched(wanted, now.before if isinstance(now, Switched) else now, hold), hold


def _put_back(which: Callable[[], Any]) -> None:
    config = which()
    now = None if config is None else config._attn_implementation
    if isinstance(now, Switched) and now.hold() is None:  # else a newer cache's, or the user's own
        _set(config, now.before)


def _set(config: Any, name: str | None) -> None:
    config._attn_implementation_internal = name  # as set_attn_implementation does; the setter would change nested ones


def _configs(model: Any) -> list[Any]:
    """The configs of a model, of its parts, and those nested in them, each once."""
    found: dict[int, Any] = {}
    waiting = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "sub_configs") and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _refusal(model: Any, config: Any) -> str | None:
    """Why this model's cache cannot be tiered, or None."""
    if config.is_encoder_decoder:
        return "has an encoder, and this is a cache for decoders"
    ways = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    if ways and not any(ways):
        return ENCODER
    if getattr(config, "kv_lora_rank", None):
        return "uses multi-head latent attention (kv_lora_rank), whose cache is already compressed"
    layers = hf.stock_layers(config)
    hides_state = getattr(model, "_is_stateful", False) and not _any_of(LinearAttentionCacheLayerMixin, layers)
    if hides_state or not _any_of(CacheLayerMixin, layers):
        return "is a recurrent model and keeps a state instead of keys and values"
    if not any(map(hf.can_tier, layers)) and not any(getattr(layer, "is_sliding", False) for layer in layers):
        return f"has no full-attention layer but {sorted({type(layer).__name__ for layer in layers})}"
    if hf.cache_name(model) is None:
        return ENCODER
    if "reuse" in (getattr(config, "kv_sharing_modes", None) or ()) and not sum(hf.kv_sharers(config)):
        return "shares keys and values between layers in an unknown way (kv_sharing_modes)"
    if sum(hf.kv_sharers(config)) and len({parameter.device for parameter in model.parameters()}) > 1:
        return "shares keys and values between layers, which is not supported over several devices"
    return None


def _any_of(kind: type, layers: list[Any]) -> bool:
    return any(isinstance(layer, kind) for layer in layers)


# -- hooks --------------------------------------------------------------------------------------------------------

_hooked: weakref.WeakKeyDictionary[nn.Module, Callable[[], Hold | None]] = weakref.WeakKeyDictionary()


def listen(module: nn.Module) -> Hold:
    """Show each call of a model, or of what wraps one, to the cache among the call's own arguments.

    The two hooks know no cache, so all caches and threads share them.
    """
    with changing():
        hold = _hooked.get(module, lambda: None)()
        if hold is None:
            handles = (
                module.register_forward_pre_hook(_before_call, with_kwargs=True),
                module.register_forward_hook(_after_call, with_kwargs=True),
            )
            hold = Hold(partial(_remove, handles))
            _hooked[module] = weakref.ref(hold)
        return hold


def _remove(handles: tuple[Any, ...]) -> None:
    for handle in handles:
        handle.remove()


def _before_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Tell the call's cache the token ids. Without ``kwargs`` torch calls hooks that go, or come, at this moment."""
    for cache in _listeners(args, kwargs):
        ids = (kwargs or {}).get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) or isinstance(module, PreTrainedModel):  # a wrapper may take something else
            cache.note_ids(ids if isinstance(ids, Tensor) else None)


def _after_call(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
    """Show the call's cache what came out."""
    if len(rest) == 2:
        for cache in _listeners(args, rest[0]):
            cache.note_output(*rest)


def _listeners(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    return [] if kwargs is None else [each for each in (*args, *kwargs.values()) if hasattr(type(each), "note_output")]
