"""Sessions of formats 3 and 4: slots were columns of the mask, padding stood on the left, position ids lagged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fade_runtime.cache.layer_state import ROWS
from predictor.errors import FadeError


def upgraded(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors `[...]` of a session of format 3 or 4 as the present format has them.

    Raises:
        FadeError: saved between two chunks of a prompt, or with a budget that follows a target in bytes, of which
            that format did not store all.
    """
    if any(layer.get("held") for layer in facts["layers"]):
        raise FadeError("an older release saved this session between two chunks of a prompt; read the prompt again")
    if facts["options"].get("memory") is not None:
        raise FadeError("an older release saved this session with memory=..., but not its budget; read the text again")
    tensors, layers, rows = dict(tensors), [], list[dict[str, Any]]()
    n_sink = facts["options"].get("n_sink", 4)
    for index, layer in enumerate(facts["layers"]):
        if layer["kind"] != "TieredLayer" or layer["device"] is None:
            layers.append({**layer, "prompts": [], "final": 0, "record_past": False})
            continue
        named = f"{index}."
        pad, shift = tensors.pop(f"{named}pad"), tensors.pop(f"{named}shift")
        slots = tensors[f"{named}full.slots"]
        slots = torch.where(slots >= pad[:, None], slots - pad[:, None], -1).to(torch.int32)
        tensors[f"{named}full.slots"] = slots
        heads = tensors[f"{named}full.key"].shape[1]
        for name in [name for name in tensors if name.startswith(named)]:
            if name.endswith(".page_slot"):  # of the packed tokens, resident and spilled
                row = tensors[name.replace("page_slot", "page_row")].long()
                tensors[name] = tensors[name] - pad[row // heads].to(torch.int32)
            elif name.endswith(".slot"):  # of product-quantised ones
                owner = tensors[f"{name.removesuffix('slot')}row_len"].long()
                of = torch.arange(len(owner)).repeat_interleave(owner)
                tensors[name] = (tensors[name] - pad[of // heads]).to(tensors[name].dtype)
        if not rows:  # the same in all layers
            kept = facts["options"].get("positions") == "streaming" or facts["codebook"] is not None
            rows = [_rows(layer["seen"], pad, shift if kept else None, tensors)]
        lengths = (layer["seen"] - pad).clamp(min=0)
        outside = torch.where(slots >= n_sink, slots.long(), lengths[:, None])
        facts_now = {
            "prompts": [max(layer["prompt"] - int(each), 0) for each in pad],
            "final": layer["seen"], "record_past": False, "held": [], "sequences": 0,
            "moved": torch.minimum(outside.amin(1), lengths).tolist() if slots.shape[1] else lengths.tolist(),
        }  # fmt: skip
        layers.append({**layer, **facts_now})
    return {**facts, "layers": layers, "rows": rows, "guard": None, "memory": None}, tensors


def _rows(seen: int, pad: Tensor, shift: Tensor | None, tensors: dict[str, Tensor]) -> dict[str, Any]:
    columns = torch.arange(seen)
    if bool(pad.any()):
        tensors[f"{ROWS}0.real"] = columns >= pad[:, None]
    if shift is not None:
        tensors[f"{ROWS}0.positions"] = (columns - shift[:, None]).clamp(min=0).to(torch.int32)
    return {"seen": seen, "batch": len(pad), "new": 1, "plain": True}
