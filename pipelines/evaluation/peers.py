"""Other projects' caches: transformers' quantised cache, kvpress, fade-kv. Each only when it is installed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import QuantizedCache

from fade_runtime.transformers_api import forward_kwargs, geometry
from pipelines.evaluation.peer import Peer, peer_errors
from predictor.errors import FadeError


@dataclass(frozen=True)
class Quantised(Peer):
    """transformers' `QuantizedCache`: everything kept, the newest ``residual_length`` tokens at most in full precision.

    Source: Liu et al. 2024, KIVI (arXiv 2402.02750), as transformers implements it.

    Attributes:
        nbits: of keys and values. q_group_size: elements of one scale. axis_key, axis_value: of the groups.
    """

    nbits: int = 4
    q_group_size: int = 64
    axis_key: int = 0
    axis_value: int = 0

    backend: ClassVar[str]
    stores: ClassVar[bool] = True
    stride: ClassVar[int] = 128  # transformers' residual_length

    def cache(self, model: Any) -> Any:
        """An empty cache of the backend."""
        self.imported()
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        return QuantizedCache(self.backend, model.config, residual_length=self.stride, **options)

    def copied(self, cache: Any) -> Any:
        """A copy that shares what is quantised: that is replaced, not changed, and quanto cannot copy it."""
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        return other


@dataclass(frozen=True)
class Quanto(Quantised):
    """By quanto."""

    package: ClassVar[str] = "optimum.quanto"
    install: ClassVar[str] = "optimum-quanto"
    backend: ClassVar[str] = "quanto"


@dataclass(frozen=True)
class Hqq(Quantised):
    """By half-quadratic quantisation (Badri and Shaji 2023)."""

    axis_key: int = 1
    axis_value: int = 1

    package: ClassVar[str] = "hqq"
    install: ClassVar[str] = "hqq"
    backend: ClassVar[str] = "hqq"


@dataclass(frozen=True)
class Kvpress(Peer):
    """A press of kvpress: what it drops while the prompt is read never comes back, what it keeps stays as it is.

    Attributes:
        press: name of its class, such as SnapKVPress. options: of the press; ``compression_ratio`` is the part that
            it drops.
    """

    press: str = "SnapKVPress"
    options: Mapping[str, Any] = field(default_factory=dict)

    package: ClassVar[str] = "kvpress"
    install: ClassVar[str] = "kvpress (with --no-deps where it asks for an older transformers)"
    stores: ClassVar[bool] = True
    keeps_positions: ClassVar[bool] = True

    def make_press(self) -> Any:
        """The press.

        Raises:
            FadeError: no such press, or options that it does not take.
        """
        package = self.imported()
        if not hasattr(package, self.press):
            near = ", ".join(name for name in dir(package) if name.endswith("Press"))
            raise FadeError(f"press {self.press!r} is not in kvpress; it has {near}")
        try:
            return getattr(package, self.press)(**self.options)
        except (TypeError, AssertionError, ValueError) as error:
            raise FadeError(f"press {self.press} does not take {dict(self.options)}: {error}") from error

    def read(self, model: Any, tokens: Tensor, cache: Any) -> Tensor:
        """Read a prompt [1, S] while the press is on; the logits after its last token: [1, V]."""
        with hooked(model, self.make_press()):
            return super().read(model, tokens, cache)

    def listen(self, model: Any, cache: Any) -> AbstractContextManager[None]:
        """The press works on this cache while the model reads a prompt into another."""
        return hooked(model, self.make_press(), cache, self)


def under_older_names(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What an attention module was called with, as kvpress reads it: the cache and the positions under older names."""
    cache: Any = kwargs.get("past_key_values", kwargs.get("cache"))
    length, new = cache.layers[module.layer_idx].get_seq_length(), kwargs["hidden_states"].shape[1]
    return {"cache_position": torch.arange(length - new, length), **kwargs, "past_key_values": cache}


@contextmanager
def hooked(model: Any, press: Any, cache: Any = None, peer: Peer | None = None) -> Iterator[None]:
    """Hook a press into each attention module, as its own context manager does, under the names of any transformers.

    It works on the cache that the model fills, or on another one that holds the same; its mistakes are the peer's.

    Raises:
        FadeError: the press masks what it drops: that frees no memory, and the mask is the model's, not the cache's.
    """

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        kwargs = kwargs if cache is None else {**kwargs, "past_key_values": cache}
        if peer is None:
            return press.forward_hook(module, args, under_older_names(module, kwargs), output)
        with peer_errors(peer, kwargs["hidden_states"].shape[1]):
            out = press.forward_hook(module, args, under_older_names(module, kwargs), output)
            refuse_masks([module], press)  # at once: other presses listen too
            return out

    press.post_init_from_model(model)
    modules, hooks = [layer.self_attn for layer in model.model.layers], []
    try:
        for module in modules:
            module.rotary_emb = model.model.rotary_emb
            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        yield
        refuse_masks(modules, press)
    finally:
        for each in hooks:
            each.remove()


def refuse_masks(modules: Sequence[Any], press: Any) -> None:
    """Take back the masks that a press has left on attention modules, and refuse it."""
    masked = [module for module in modules if getattr(module, "masked_key_indices", None) is not None]
    for module in masked:
        module.masked_key_indices = None
    if masked:
        raise FadeError(
            f"{type(press).__name__} masks what it drops and frees nothing, so its cache has the size of the full one; "
            "leave it out, or let kvpress evaluate it"
        )


@dataclass(frozen=True)
class FadeKv(Peer):
    """fade-kv, reassigned once by the attention of the whole prompt, which its h2o policy needs.

    Attributes:
        preset: safe, balanced or aggressive. options: of its FadeConfig that differ from the preset's.
    """

    preset: str = "balanced"
    options: Mapping[str, Any] = field(default_factory=dict)

    package: ClassVar[str] = "fade"
    install: ClassVar[str] = "fade-kv (with --no-deps where it asks for an older transformers)"

    def cache(self, model: Any) -> Any:
        """An empty cache of the preset."""
        package, rope = self.imported(), self.imported(".rope")
        base: Any = package.TieredKVCache
        try:
            config = getattr(package.FadeConfig, self.preset)().with_overrides(**self.options)
        except (AttributeError, TypeError, ValueError) as error:
            raise FadeError(f"fade-kv has no preset {self.preset!r} with {dict(self.options)}: {error}") from error

        class Adapted(base):  # under transformers newer than fade-kv knows
            batch_size = None  # a property without a setter there by now

            def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
                return super().update(key, value, layer)  # keywords that came later

        dim = geometry(model.config)[1]
        scheme = rope.extract_rope_scheme(model.config, head_dim=dim)
        options = {**config.to_cache_kwargs(), "rope_theta": scheme.theta, "rope_scheme": scheme}
        return Adapted(dtype=model.dtype, head_dim=dim, **options)

    def read(self, model: Any, tokens: Tensor, cache: Any) -> Tensor:
        """Read a prompt [1, S] with eager attention, then let fade-kv assign tiers by what it received: [1, V]."""
        policy, before = self.imported(".policy"), model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            options = dict(logits_to_keep=1, use_cache=True, output_attentions=True)
            out = model(tokens, **options, **forward_kwargs(cache, model))
        finally:
            model.set_attn_implementation(before)
        policy.reassign_tiers_h2o(cache, list(out.attentions), model.config.num_hidden_layers)
        return out.logits[0]


PEERS: dict[str, Callable[..., Peer]] = {"quanto": Quanto, "hqq": Hqq, "kvpress": Kvpress, "fade-kv": FadeKv}


def make_peer(name: str, options: Mapping[str, Any]) -> Peer:
    """A peer by the name of its project.

    Args:
        name: of :data:`PEERS`. options: nbits, q_group_size and axes for quanto and hqq; press and the press's own for
            kvpress; preset and the preset's own for fade-kv.

    Raises:
        FadeError: unknown peer or option; a package that is not installed.

    Example:
        >>> make_peer("gguf", {"bits": 4})
        Traceback (most recent call last):
            ...
        predictor.errors.FadeError: peer 'gguf' is not known; choose from quanto, hqq, kvpress, fade-kv
    """
    if name not in PEERS:
        raise FadeError(f"peer {name!r} is not known; choose from {', '.join(PEERS)}")
    kind = PEERS[name]
    own = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    others = {key: value for key, value in options.items() if key not in own}
    if others and "options" not in own:
        raise FadeError(f"peer {name!r} has no option {min(others)!r} but {', '.join(sorted(own))}")
    known = {key: value for key, value in options.items() if key in own}
    peer = kind(**known, **({"options": others} if others else {}))
    peer.imported()
    if isinstance(peer, Kvpress):
        peer.make_press()
    return peer


def versions(peers: Iterable[Peer]) -> dict[str, str]:
    """Name and version of each peer's package."""
    found = {}
    for name in sorted({peer.install.split()[0] for peer in peers}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "of no known version"  # a folder on the path
    return found
