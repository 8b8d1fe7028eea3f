"""A layer of the tiered cache as tensors and JSON-able facts, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fade_runtime.layer import AttentionCall, FullTokens, TieredLayer
from fade_runtime.layer.held import HeldCall, HeldCalls
from fade_runtime.layer.sequences import Sequences
from fade_runtime.storage.tokens import StoredTokens, none_of
from predictor.errors import FadeError

STATS = "attention_stats"
SPILLED, HELD, ROWS = "spilled.", "held.", "rows."  # how the names of such tensors begin
LAYER = ("prompts", "final", "record_past")  # plain attributes of a layer that has begun
STORE = ("seen", "evicted", "moved")  # and of its store


def layer_facts(layer: Any, index: int, tensors: dict[str, Tensor], shared: list[Sequences]) -> dict[str, Any]:
    """Describe a layer of a cache, between two calls of its model.

    Args:
        layer: a :class:`TieredLayer` or one of transformers' own.
        index: of the layer.
        tensors: takes copies `[...]` of what the layer holds, on the CPU, by ``index`` and name.
        shared: takes the rows of its batch, if they are not in it yet.

    Raises:
        FadeError: the layer holds something that is neither a tensor nor a plain value.
    """
    if not isinstance(layer, TieredLayer):
        return {"kind": type(layer).__name__, "attributes": _encode(vars(layer), str(index), tensors)}
    facts: dict[str, Any] = {"kind": TieredLayer.__name__, "device": None}
    facts |= {name: getattr(layer, name) for name in LAYER}
    facts["watch"] = None if layer.hooks is None else layer.hooks.facts()
    if layer.store is None:
        return facts
    facts["held"] = [
        {"new": held.sequences.new, "plain": held.sequences.plain, "scaling": held.call.scaling,
         "softcap": held.call.softcap}
        for held in layer.held.calls
    ]  # fmt: skip
    tensors |= {f"{index}.{_stored(name)}": _copied(tensor) for name, tensor in layer.tensors().items()}
    store = layer.store
    if not any(each is store.sequences for each in shared):
        shared.append(store.sequences)
    facts["sequences"] = next(at for at, each in enumerate(shared) if each is store.sequences)
    facts |= {name: getattr(store, name) for name in (*STORE, "oldest")}
    spilled = store.whole().back
    for at, body in enumerate(spilled):
        tensors |= {
            f"{index}.{SPILLED}{at}.{_stored(name)}": _copied(tensor) for name, tensor in body.tensors().items()
        }
    kinds = [type(body).__name__ for body in spilled]
    return {**facts, "bits": list(store.packed.bits), "spilled": kinds, "device": str(layer.device)}


def sequences_facts(sequences: Sequences, number: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Describe the rows of a batch; ``tensors`` takes copies of theirs [B, S], by :data:`ROWS`, ``number`` and name."""
    for name in ("real", "positions"):
        if (tensor := getattr(sequences, name)) is not None:
            tensors[f"{ROWS}{number}.{name}"] = _copied(tensor)
    return {name: getattr(sequences, name) for name in ("seen", "batch", "new", "plain")}


def restored_sequences(
    facts: Mapping[str, Any], number: int, tensors: Mapping[str, Tensor], device: torch.device
) -> Sequences:
    """Undo :func:`sequences_facts`: rows whose tensors [B, S] are on ``device``."""
    held = {name: tensors.get(f"{ROWS}{number}.{name}") for name in ("real", "positions")}
    for name, tensor in held.items():
        if tensor is not None and tensor.shape != (facts["batch"], facts["seen"]):
            raise ValueError(f"{name} of rows {number} has shape {list(tensor.shape)}")
    copies = {name: None if tensor is None else _copied(tensor, device) for name, tensor in held.items()}
    return Sequences(facts["seen"], facts["batch"], device, **copies, new=facts["new"], plain=facts["plain"])


def restored_layer(
    layer: Any,
    index: int,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    shared: Callable[[int, torch.device], Sequences],
) -> Any:
    """Make a layer that holds what :func:`layer_facts` found.

    Args:
        layer: a :class:`TieredLayer`, which is left as it is, or a new layer of transformers, which is filled.
        index: of the layer. facts: what was found. tensors: `[...]` by index and name; they are copied.
        model: says on which device. shared: gives the rows of the batch by their number.

    Raises:
        FadeError: another release of transformers, whose layer has other attributes.
        ValueError: facts of another layer, or tensors that are not those of the facts.
    """
    if type(layer).__name__ != facts["kind"]:
        raise ValueError(f"layer {index} is a {type(layer).__name__}, a {facts['kind']} is stored")
    if isinstance(layer, TieredLayer):
        return _tiered(layer, index, facts, tensors, model, shared)
    attributes = _decode(facts["attributes"], tensors, model)
    if missing := sorted(set(vars(layer)) - set(attributes)):
        raise FadeError(
            f"the session has no {missing[0]!r} for layer {index}, a {type(layer).__name__} of transformers "
            f"{transformers.__version__}; use the transformers that it was made with"
        )
    vars(layer).update(attributes)
    return layer


def _tiered(
    layer: TieredLayer,
    index: int,
    stored: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    shared: Callable[[int, torch.device], Sequences],
) -> TieredLayer:
    fresh = copy.copy(layer)
    fresh.hooks = None
    fresh.reset()
    fresh.hooks = None if layer.hooks is None else layer.hooks.from_facts(stored["watch"])
    if stored["device"] is None:
        return fresh
    device = _device(model, stored["device"])
    start = f"{index}."
    held = {
        _named(name.removeprefix(start)): _copied(t, device) for name, t in tensors.items() if name.startswith(start)
    }
    spilled = {name: held.pop(name) for name in list(held) if name.startswith(SPILLED)}
    queries = {name: held.pop(name) for name in list(held) if name.startswith(HELD)}
    fresh.lazy_initialization(held["full.key"], held["full.value"])
    for name in LAYER:
        setattr(fresh, name, stored[name])
    store = fresh.tokens
    if set(held) != set(store.tensors()) or list(store.packed.bits) != stored["bits"]:
        raise ValueError(f"layer {index} stores tokens in another form")
    parts: dict[str, dict[str, Any]] = {"full": {}, "packed": {}, "pq": {}}
    for part, _, name in (name.partition(".") for name in held if "." in name):
        parts[part][name] = held[f"{part}.{name}"]
    store.full = FullTokens(**parts["full"])
    store.packed = replace(store.packed, **parts["packed"])
    store.pq = None if store.pq is None else replace(store.pq, **parts["pq"])
    store.profiles, store.extra, store.comparisons = map(held.get, ("policies", "extra", "comparisons"))
    for name in STORE:
        setattr(store, name, stored[name])
    store.oldest = stored.get("oldest", 0)  # younger than the format
    store.sequences = shared(stored["sequences"], device)
    if not len(store.moved) == len(fresh.prompts) == store.batch == store.sequences.batch:
        raise ValueError(f"layer {index} has another batch size")
    fresh.held = _held(stored["held"], queries, store.sequences, layer.setup.window)
    none = [none_of(body) for body in store.body()]
    for at, kind in enumerate(stored.get("spilled", ())):
        start = f"{SPILLED}{at}."
        found: dict[str, Any] = {n.removeprefix(start): t for n, t in spilled.items() if n.startswith(start)}
        bodies: list[StoredTokens] = [replace(form, **found) if type(form).__name__ == kind else form for form in none]
        if store.spilled is None or not store.spilled.add(bodies):
            store.take_in(bodies)
    return fresh


def _stored(name: str) -> str:
    """A tensor's name in sessions, which is older than its name in the code."""
    return name.removesuffix(STATS) + "state" if name.endswith(STATS) else name


def _named(name: str) -> str:
    """Undo :func:`_stored`."""
    return name.removesuffix("state") + STATS if name == "state" or name.endswith(".state") else name


def _held(
    stored: Sequence[Mapping[str, Any]], tensors: dict[str, Tensor], sequences: Sequences, window: int | None
) -> HeldCalls:
    calls: list[HeldCall] = []
    for number, facts in reversed([*enumerate(stored)]):
        query, mask = tensors[f"{HELD}{number}.queries"], tensors.get(f"{HELD}{number}.mask")
        sequences = replace(sequences, new=facts["new"], plain=facts["plain"])
        hides, sinks = window if mask is None else None, tensors.get(f"{HELD}{number}.sinks")
        calls.append(HeldCall(AttentionCall(query, mask, facts["scaling"], facts["softcap"], hides, sinks), sequences))
        sequences = sequences.cropped(facts["new"])
    return HeldCalls(calls[::-1])


def _encode(thing: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Put the tensors of nested containers into ``tensors`` and the rest into JSON."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, Tensor):
        tensors[name] = _copied(thing)
        return {"tensor": name, "device": str(thing.device)}
    if isinstance(thing, torch.dtype):
        return {"dtype": str(thing).removeprefix("torch.")}
    if isinstance(thing, torch.device):
        return {"device": str(thing)}
    if isinstance(thing, dict):
        return {"dict": [[key, _encode(each, f"{name}.{key}", tensors)] for key, each in thing.items()]}
    if isinstance(thing, list | tuple):
        kind = "tuple" if isinstance(thing, tuple) else "list"
        return {kind: [_encode(each, f"{name}.{at}", tensors) for at, each in enumerate(thing)]}
    raise FadeError(
        f"layer {name} holds a {type(thing).__name__}, which a session cannot store; sessions know tensors, "
        "containers, numbers and text"
    )


def _decode(stored: Any, tensors: Mapping[str, Tensor], model: nn.Module) -> Any:
    """Undo :func:`_encode`, on the model's device."""
    if not isinstance(stored, dict):
        return stored
    if "tensor" in stored:
        return _copied(tensors[stored["tensor"]], _device(model, stored["device"]))
    ((kind, inside),) = stored.items()
    if kind == "dtype":
        return getattr(torch, inside)
    if kind == "device":
        return _device(model, inside)
    if kind == "dict":
        return {key: _decode(each, tensors, model) for key, each in inside}
    return (tuple if kind == "tuple" else list)(_decode(each, tensors, model) for each in inside)


def _device(model: nn.Module, stored: str) -> torch.device:
    """Where a tensor goes: to the model, or to where it was if the model is on several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else torch.device(stored)


def _copied(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    return tensor.detach().to(device, copy=True)
