"""Sessions: what a tiered cache holds, on disk, so that another process goes on with exactly the same logits.

A session is a directory: ``session.safetensors`` has every tensor in its stored form, ``session.json`` the rest and the
checksums of both. The model, the predictor and the codebook are not in it, only what tells them apart from others.
The tensors are readable by their owner only: they say much about the text. "The same" holds for the same kind of device
and the same attention kernel; another one rounds otherwise.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fade_runtime import transformers_api as hf
from fade_runtime.cache.layer_state import layer_facts, restored_layer, restored_sequences, sequences_facts
from fade_runtime.cache.parts import CacheParts
from fade_runtime.cache.session_upgrade import upgraded
from fade_runtime.config.config import FadeConfig
from fade_runtime.guard import Watch
from fade_runtime.layer import TieredLayer
from fade_runtime.layer.sequences import Sequences
from predictor.errors import FadeError
from predictor.provenance import check_provenance, model_provenance
from predictor.sealed import Sealed

VERSION = 5  # 4 and 3 told padding by its number alone; 3 knew parameters in float16 alone (session_upgrade.py)
OLDEST = 3  # 2 had key scales in 16 bits; 1 read low codes as levels that end at both ends of their range
TENSORS, FACTS = "session.safetensors", "session.json"
NAMED = ("tokenizer", "assistant", "spill_dir")  # options that are stored by where they were loaded from
SESSION = Sealed(
    "session",
    FACTS,
    TENSORS,
    version=VERSION,
    oldest=OLDEST,
    sealed_since=1,
    remedy="write it again",
    absent="write one with save_session, or check the path",
    digest="tensors_sha256",
)
IDS = "text.ids"  # of the tokens, where the cache reads the text
FREE = (
    "strict",
    "phase",
    "spill_dir",
    "spill_limit",
    "monitor_every",
    "kl_target",
    "kl_alarm",
)  # options that change nothing in a cache that is there
REFERENCES = ("predictor", "codebook")  # options that are compared by what they stand for
PLACES = (*REFERENCES, *NAMED)  # options that say where something is: what a session holds of them is only a name


def save_session(cache: CacheParts, path: str | Path) -> Path:
    """Write what a cache holds as a directory, whole or not at all; a session that is at ``path`` is replaced.

    Raises:
        FadeError: something else is at ``path``, it cannot be written, or the cache's model is gone.

    Example:
        >>> import tempfile
        >>> from fade_runtime import create_tiered_cache, load_session
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        ...                    vocab_size=8)
        >>> model = LlamaForCausalLM(tiny).eval()
        >>> cache = create_tiered_cache(model, FadeConfig(recent_window=8, int4_budget=16))
        >>> _ = model(torch.randint(8, (1, 64)), **hf.forward_kwargs(cache, model))
        >>> path = save_session(cache, tempfile.mkdtemp())
        >>> load_session(model, path).get_seq_length()
        64
    """
    path = Path(path)
    SESSION.refuse_other(path)
    state = cache_state_dict(cache)
    facts = state.pop("facts")
    order = {name: _order(tensor) for name, tensor in state.items() if not tensor.is_contiguous()}
    dense = {name: t.permute(order[name]) if name in order else t for name, t in state.items()}
    try:
        SESSION.write(path, facts | {"order": order}, dense, shared=False)
    except OSError as error:
        raise FadeError(f"session {path} cannot be written ({error.strerror}); name another path") from error
    return path


def stored_config(facts: Mapping[str, Any], options: Mapping[str, Any], what: str) -> FadeConfig:
    """The options in a session, with those that are given in their place."""
    try:
        stored = _options(facts)
        for name in REFERENCES:
            stored[name] = None if facts[name] is None else facts[name]["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(what, f"{type(error).__name__} {error}") from error
    named = {name: stored.get(name) for name in PLACES}
    if isinstance(named["assistant"], int):  # so many layers of the model itself
        del named["assistant"]
    missing = [name for name, value in named.items() if value is not None and name not in options]
    if missing:
        was = ", ".join(f"{name} {stored[name]!r}" for name in missing)
        raise FadeError(
            f"{what} was made with {was}, and a session does not choose what is read, loaded or written: say it "
            f"yourself, load_session(model, path, {', '.join(f'{name}=...' for name in missing)})"
        )
    try:
        return FadeConfig().with_options(**{**stored, **options})
    except (FadeError, TypeError, ValueError) as error:
        raise FadeError(f"{what} cannot be set up as it was: {error}; or give its config") from error


def resume_session(cache: CacheParts, path: str | Path) -> None:
    """Replace what a cache holds by a session; a session that is refused leaves the cache as it was.

    Raises:
        FadeError: not there, damaged, of another model, or other options, predictor or codebook.
    """
    load_cache_state_dict(cache, read_session(Path(path)), f"session {path}")


def cache_state_dict(cache: CacheParts) -> dict[str, Any]:
    """Copy what a cache holds, between two calls of its model.

    Returns:
        "facts": a JSON-able dictionary: options, model, and per layer all that is no tensor; and every tensor by the
        index of its layer and its name, for example "0.packed.key_codes", on the CPU.

    Raises:
        FadeError: the cache's model is gone, or a layer holds something that is neither tensor nor plain value.
    """
    model = cache.model
    cache.settle()
    tensors: dict[str, Tensor] = {}
    shared: list[Sequences] = []
    layers = [layer_facts(layer, index, tensors, shared) for index, layer in enumerate(cache.layers)]
    if cache.text is not None:
        tensors[IDS] = cache.text.ids.to("cpu", copy=True)
    facts = {
        "version": VERSION,
        "transformers": transformers.__version__,
        "options": stored_options(cache.config),
        "predictor": _predictor_facts(cache),
        "codebook": _codebook_facts(cache),
        "model": model_provenance(model),
        "dtype": _dtype(model),
        "layers": layers,
        "rows": [sequences_facts(each, number, tensors) for number, each in enumerate(shared)],
        "guard": None if cache.guard is None else cache.guard.facts(),
        "memory": None if cache.memory is None else cache.memory.facts(),
        "shapes": _shapes(tensors),
    }
    return {"facts": json.loads(json.dumps(facts)), **tensors}


def load_cache_state_dict(cache: CacheParts, state: Mapping[str, Any], what: str = "session") -> None:
    """Replace what a cache holds by what :func:`cache_state_dict` gave; all of it or nothing.

    Args:
        cache: of the same model with the same options, used or new.
        state: the dictionary; its tensors are copied.
        what: how messages call it.

    Raises:
        FadeError: of another model or dtype, other options, predictor or codebook, or incomplete.
    """
    model = cache.model
    try:
        facts, tensors = state["facts"], {name: t for name, t in state.items() if name != "facts"}
        _check(cache, facts, model, what)
        if _shapes(tensors) != facts["shapes"]:
            raise _damaged(what, "its tensors are not those that it names")
        if facts["version"] < VERSION:
            facts, tensors = upgraded(facts, tensors)
        rows: dict[tuple[int, torch.device], Sequences] = {}

        def shared(number: int, device: torch.device) -> Sequences:
            key = number, device
            if key not in rows:
                rows[key] = restored_sequences(facts["rows"][number], number, tensors, device)
            return rows[key]

        stock = hf.stock_layers(hf.text_config(model))
        new = [
            ours if isinstance(ours, TieredLayer) else theirs for ours, theirs in zip(cache.layers, stock, strict=True)
        ]
        layers = [
            restored_layer(layer, index, stored, tensors, model, shared)
            for index, (layer, stored) in enumerate(zip(new, facts["layers"], strict=True))
        ]
        if cache.text is not None:
            ids = tensors[IDS].to(next(model.parameters()).device, copy=True)
        guard, memory = copy.copy(cache.guard), copy.copy(cache.memory)
        for each, stored in ((guard, facts["guard"]), (memory, facts["memory"])):
            if each is not None and stored is not None:
                each.restore(stored)
    except (FadeError, torch.OutOfMemoryError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise _damaged(what, f"{type(error).__name__} {error}") from error
    cache.layers = layers
    cache.shared.reset()
    if cache.text is not None:
        cache.text.reset()
        cache.text.ids = ids
    if cache.memory is not None:
        vars(cache.memory).update(vars(memory))
    if cache.allocation is not None:
        cache.allocation.reset()
    if cache.guard is not None:
        vars(cache.guard).update(vars(guard))
        cache.guard.watches = [layer.hooks for layer in cache.tiered if isinstance(layer.hooks, Watch)]


def _options(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The options in a session; one that does not say how sliding windows are stored is older than the choice."""
    return {"sliding": "exact", **facts["options"]}


def stored_options(config: FadeConfig) -> dict[str, Any]:
    """The options of a configuration as JSON-able values; predictor and codebook are left out."""
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in REFERENCES}
    for name in NAMED:
        if not (options[name] is None or isinstance(options[name], int)):
            options[name] = str(getattr(options[name], "name_or_path", options[name]))
    return options


# -- what must be the same ---------------------------------------------------------------------------------------


def _check(cache: CacheParts, facts: Mapping[str, Any], model: nn.Module, what: str) -> None:
    check_provenance(facts["model"], model, what)
    if facts["dtype"] != _dtype(model):
        raise FadeError(
            f"{what} holds tokens of a model in {facts['dtype']}, this one is in {_dtype(model)}; load it in that dtype"
        )
    stored, here = _options(facts), stored_options(cache.config)
    defaults = {field.name: field.default for field in fields(FadeConfig) if field.default is not MISSING}
    for name in sorted({*stored, *here} - set(FREE)):
        if name not in here:
            raise FadeError(f"{what} has an option {name!r} that this release does not know; upgrade fade-predictor")
        before, now = stored.get(name, defaults.get(name)), here[name]
        if (before, type(before)) != (now, type(now)):
            raise FadeError(f"{what} was made with {name} {before!r}, this cache has {now!r}; use the same options")
    for name, now in (("predictor", _predictor_facts(cache)), ("codebook", _codebook_facts(cache))):
        before = facts[name]
        if (before or {}).get("sha256") != (now or {}).get("sha256"):
            theirs, ours = ("none" if each is None else each["name"] for each in (before, now))
            raise FadeError(f"{what} was made with another {name} ({theirs}, here {ours}); give the same one")


def _predictor_facts(cache: CacheParts) -> dict[str, Any] | None:
    predictor = cache.policy.predictor
    if predictor is None:
        return None
    facts = [predictor.spec.to_dict(), None if predictor.budgets is None else predictor.budgets.to_dict()]
    return {"name": predictor.name, "sha256": _digest(predictor.state_dict(), facts)}


def _codebook_facts(cache: CacheParts) -> dict[str, Any] | None:
    if cache.codebook is None:
        return None
    centroids = {str(index): tensor for index, tensor in enumerate(cache.codebook.tensors())}
    return {"name": cache.codebook.name, "sha256": _digest(centroids, None)}


def _digest(tensors: Mapping[str, Tensor], facts: Any) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}


def _dtype(model: nn.Module) -> str:
    return next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), "no dtype")


# -- files -------------------------------------------------------------------------------------------------------


def read_session(path: Path) -> dict[str, Any]:
    """The state in a session's files, verified."""
    facts = SESSION.read_facts(path, str(path))
    tensors, order = SESSION.read_tensors(path, str(path), facts), facts["order"]
    stored = {n: t.permute(torch.tensor(order[n]).argsort().tolist()) if n in order else t for n, t in tensors.items()}
    return {"facts": facts, **stored}


def _order(tensor: Tensor) -> list[int]:
    """Dims from the slowest to the fastest in memory."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def _damaged(what: str, why: str) -> FadeError:
    return FadeError(f"{what} is damaged: {why}; write it again")
