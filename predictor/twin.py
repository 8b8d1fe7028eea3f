"""A second model on the same weights."""

from __future__ import annotations

import copy
from typing import Any


def dense_twin(model: Any) -> Any:
    """A second model on the same weights, whose settings and buffers can change without the first one noticing.

    It takes a fraction of a second and no memory to speak of. Other threads may use the model meanwhile.

    Args:
        model: of torch, with a configuration if it is one of transformers.

    Returns:
        Modules, configuration and hooks are copies; parameters and buffers are the model's own.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> twin = dense_twin(model)
        >>> twin.eval().training, model.training, twin[0].weight is model[0].weight
        (False, True, True)
    """
    while True:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        try:
            return copy.deepcopy(model, shared)
        except RuntimeError as error:  # another thread has just hung a hook on the model, or taken one off
            if not {"changed", "mutated"} & set(str(error).split()):
                raise
