"""Other projects' caches beside ours: transformers' quantised cache, kvpress, fade-kv. Each only when it is installed.

A peer works the way its own documentation shows: it compresses what it compresses while the prompt is read, or after
it, and then decodes. Its bytes are counted by walking what is reachable from its cache, not taken from its own report.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fade_runtime.transformers_api import forward_kwargs, geometry
from predictor.errors import FadeError


@dataclass(frozen=True)
class Peer:
    """A cache of another project.

    Attributes:
        package: what must be importable. install: how pip names it.
        stride: tokens that may come in one call and leave the cache as they would one at a time.
        stores: the cache stores a prompt's keys and values, whoever reads it, and does the rest by :meth:`listen`.
        keeps_positions: after it has evicted, tokens go on at their place in the text, and the caller must say so.
    """

    package: ClassVar[str]
    install: ClassVar[str]
    stride: ClassVar[int] = 64
    stores: ClassVar[bool] = False
    keeps_positions: ClassVar[bool] = False

    def imported(self, name: str = "") -> Any:
        """The package, or a module in it.

        Raises:
            MissingPeer: it is not installed.
        """
        try:
            return importlib.import_module(f"{self.package}{name}")
        except ImportError as error:
            raise MissingPeer(
                f"{self.package} cannot be imported ({error}); pip install {self.install}, or leave its caches out"
            ) from error

    def cache(self, model: Any) -> Any:
        """An empty cache for the model."""
        return DynamicCache(config=model.config)

    def read(self, model: Any, tokens: Tensor, cache: Any) -> Tensor:
        """Read a prompt [1, S] into the cache, compress; the logits after its last token: [1, V]."""
        return model(tokens, logits_to_keep=1, use_cache=True, **forward_kwargs(cache, model)).logits[0]

    def listen(self, model: Any, cache: Any) -> AbstractContextManager[None]:
        """While this lasts, the model reads a prompt, and the cache stores it."""
        return nullcontext()

    def copied(self, cache: Any) -> Any:
        """A copy of a cache, to go on in another way."""
        return copy.deepcopy(cache)


class MissingPeer(FadeError):
    """A peer's package is not installed, or does not work here."""


class PeerError(FadeError):
    """A peer failed, said in one line.

    Attributes:
        peer: which one.
    """

    def __init__(self, peer: Peer, tokens: int, error: Exception) -> None:
        said = " ".join(str(error).split()) or "no message"
        super().__init__(f"{peer.package} failed on {tokens} tokens: {type(error).__name__}: {said[:300]}")
        self.peer = peer


@contextmanager
def blamed(peer: Peer, tokens: int) -> Iterator[None]:
    """Whatever another project's code raises while it has ``tokens`` in hand becomes a :class:`PeerError`."""
    try:
        yield
    except Exception as error:
        raise PeerError(peer, tokens, error) from error


@dataclass(frozen=True)
class Quantised(Peer):
    """transformers' `QuantizedCache`: everything kept, the newest ``residual_length`` tokens at most in full precision.

    Source: Liu et al. 2024, KIVI (arXiv 2402.02750), as transformers implements it.

    Attributes:
        nbits: of keys and values. q_group_size: elements that share a scale. axis_key, axis_value: of the groups.
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
        from transformers import QuantizedCache

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
        press: name of its class, such as SnapKVPress. options: of the press; ``compression_ratio`` is the share that
            it drops.
    """

    press: str = "SnapKVPress"
    options: Mapping[str, Any] = field(default_factory=dict)

    package: ClassVar[str] = "kvpress"
    install: ClassVar[str] = "kvpress (with --no-deps where it asks for an older transformers)"
    stores: ClassVar[bool] = True
    keeps_positions: ClassVar[bool] = True

    def made(self) -> Any:
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
        """Read a prompt while the press is on."""
        with hooked(model, self.made()):
            return super().read(model, tokens, cache)

    def listen(self, model: Any, cache: Any) -> AbstractContextManager[None]:
        """The press works on this cache while the model reads a prompt into another."""
        return hooked(model, self.made(), cache, self)


def under_older_names(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What an attention module was called with, as kvpress reads it: the cache and the positions under older names."""
    cache: Any = kwargs.get("past_key_values", kwargs.get("cache"))
    held, new = cache.layers[module.layer_idx].get_seq_length(), kwargs["hidden_states"].shape[1]
    return {"cache_position": torch.arange(held - new, held), **kwargs, "past_key_values": cache}


@contextmanager
def hooked(model: Any, press: Any, cache: Any = None, peer: Peer | None = None) -> Iterator[None]:
    """Hook a press into each attention module, as its own context manager does, under the names of any transformers.

    It works on the cache that the model fills, or on another one that holds the same; its mistakes are the peer's.

    Raises:
        FadeError: the press masks what it drops: that frees no memory, and the mask is the model's, not the cache's.
    """

    def hook(module: nn.Module, given: Any, kwargs: dict[str, Any], output: Any) -> Any:
        kwargs = kwargs if cache is None else {**kwargs, "past_key_values": cache}
        if peer is None:
            return press.forward_hook(module, given, under_older_names(module, kwargs), output)
        with blamed(peer, kwargs["hidden_states"].shape[1]):
            out = press.forward_hook(module, given, under_older_names(module, kwargs), output)
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
        """Read a prompt with eager attention, then let fade-kv assign tiers by what it received."""
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
    made = PEERS[name]
    own = {each.name for each in fields(made)}  # type: ignore[arg-type]
    spare = {key: value for key, value in options.items() if key not in own}
    if spare and "options" not in own:
        raise FadeError(f"peer {name!r} has no option {min(spare)!r} but {', '.join(sorted(own))}")
    given = {key: value for key, value in options.items() if key in own}
    peer = made(**given, **({"options": spare} if spare else {}))
    peer.imported()
    if isinstance(peer, Kvpress):
        peer.made()
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


def resident_bytes(cache: Any, dtype: torch.dtype) -> int:
    """Bytes of every storage reachable from a cache, had the model been of two-byte floats.

    Only tensors of the model's own ``dtype`` shrink with it. Views count their whole storage, each storage once.

    Example:
        >>> kept = {"codes": torch.zeros(10, dtype=torch.uint8), "scale": [torch.ones(4)], "again": torch.ones(4)}
        >>> resident_bytes(kept, torch.float32)
        26
    """
    stored: dict[int, int] = {}
    for tensor in reachable(cache):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        stored[storage.data_ptr()] = size * 2 // dtype.itemsize if tensor.dtype == dtype else size
    stored.pop(0, None)  # empty tensors have no storage
    return sum(stored.values())


def reachable(thing: Any) -> Iterator[Tensor]:
    """Plain tensors in containers, objects' attributes and tensor subclasses, each object once; no model's."""
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, nn.Module | type | str | bytes):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            names = one.__tensor_flatten__()[0] if hasattr(one, "__tensor_flatten__") else ()
            if names:
                waiting += [getattr(one, name) for name in names]
            else:
                yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        else:
            waiting += vars(one).values() if hasattr(one, "__dict__") else []
            waiting += [getattr(one, name) for name in getattr(one, "__slots__", ()) if hasattr(one, name)]
