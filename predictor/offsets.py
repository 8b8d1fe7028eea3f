"""Head offsets: what is added to the log scores of a kv head before tokens of all heads compete for one budget.

A network's score orders the tokens of one head. With its head's offset it is comparable between the heads and layers
of a sequence, so that one threshold decides in all of them, and a head gets as much as the prompt at hand needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from predictor.cache_layers import in_words
from predictor.errors import FadeError


def offsets_to_dict(offsets: Tensor, layers: Sequence[int]) -> dict[str, Any]:
    """Head offsets [L, H] of some layers as a JSON-able dictionary, exact to the last bit.

    Example:
        >>> offsets_to_dict(torch.tensor([[0.5, -1.0]]), layers=(3,))
        {'layers': [3], 'offsets': [[0.5, -1.0]]}
    """
    return {"layers": list(layers), "offsets": offsets.tolist()}


def offsets_from_dict(stored: Any, what: str, provenance: Mapping[str, Any]) -> tuple[Tensor, tuple[int, ...]]:
    """Read head offsets back.

    Args:
        stored: from :func:`offsets_to_dict`. what: names their owner in a message.
        provenance: of the model that they are for.

    Returns:
        Offsets [L, H] float32, and the L layers' indices in the model.

    Raises:
        FadeError: no table of finite numbers, or for heads that the model cannot have.

    Example:
        >>> offsets_from_dict({"layers": [3], "offsets": [[0.5, -1.0]]}, "bundle x", {"layers": 4, "kv_heads": 2})
        (tensor([[ 0.5000, -1.0000]]), (3,))
    """
    damaged = FadeError(f"the head offsets of {what} are damaged; fetch or make it again (lightning fit)")
    try:
        offsets = torch.tensor(stored["offsets"], dtype=torch.float32)
        layers = tuple(map(int, stored["layers"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged from error
    ascending = bool(layers) and all(a < b for a, b in pairwise((-1, *layers)))
    if offsets.ndim != 2 or len(offsets) != len(layers) or not ascending or not bool(offsets.isfinite().all()):
        raise damaged
    heads, of_model = offsets.shape[1], provenance.get("layers")
    if (of_model is not None and layers[-1] >= of_model) or provenance.get("kv_heads") not in (None, heads):
        raise FadeError(
            f"{what} has head offsets for {in_words(layers)} ({heads} kv heads), and its model has {of_model} layers "
            f"({provenance.get('kv_heads')}); make it again (lightning fit)"
        )
    return offsets, layers
