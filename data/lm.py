"""The language model: loaded once, in memory of its own, ready to run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from data.gguf import forget_quantiser, is_gguf, refuse_missing_readers
from predictor.errors import FadeError, first_line

DEMO_MODEL = "artefacts/models/smollm2-135m-instruct"  # that `pipelines.demo_model` writes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_lm(name: str | Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a directory or a GGUF file, or from the hub by id.

    Returns:
        The model, as :func:`load_model` loads it, and its tokenizer.

    Raises:
        FadeError: unknown dtype; a directory or file that is missing or is not a model's; an id the hub does not give.
    """
    refuse_dtype(dtype)
    tokenizer = load_tokenizer(name)
    return load_model(name, dtype), tokenizer


def load_model(name: str | Path, dtype: str = "float32") -> Any:
    """Load a causal language model, in eval mode and on the CPU.

    Weights are copied off the memory map that safetensors leaves them on, without which decoding on a CPU crawls.

    Args:
        name: a model directory, a GGUF file, or a hub id such as ``"org/name"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.

    Raises:
        FadeError: unknown dtype; a directory or file that is missing or is not a model's; an id the hub does not give.
    """
    from transformers import AutoModelForCausalLM  # heavy: only where a model is loaded

    refuse_dtype(dtype)
    model = _load(AutoModelForCausalLM, name, dtype=DTYPES[dtype])
    if is_gguf(name):
        forget_quantiser(model)
        model.config.name_or_path = str(name)
    copy_off_memory_map(model)
    return model.eval()


def refuse_dtype(dtype: str) -> None:
    """Refuse a dtype that no model is loaded in.

    Raises:
        FadeError: names those that are known.
    """
    if dtype not in DTYPES:
        raise FadeError(f"dtype {dtype} is not known; use one of {', '.join(DTYPES)}")


def copy_off_memory_map(model: Any) -> None:
    """Copy a model's weights off the memory map that safetensors leaves them on."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def load_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer of a model directory, GGUF file or hub id.

    Raises:
        FadeError: a directory that is missing or has none; an id the hub does not give.
    """
    from transformers import AutoTokenizer  # heavy: only where a tokenizer is loaded

    return _load(AutoTokenizer, name)


def load_config(name: str | Path) -> Any:
    """Load the configuration of a model alone, which costs nothing.

    Raises:
        FadeError: a directory or file that is missing or has none; an id the hub does not give.
    """
    from transformers import AutoConfig  # heavy: only where one is loaded

    return _load(AutoConfig, name)


def positions_of(model: Any) -> int | None:
    """Tokens that a model, or one of this configuration, was made to read at most; None where it sets no limit."""
    config = getattr(model, "config", model)
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def refuse_too_long(model: Any, tokens: int, what: str, remedy: str) -> None:
    """Refuse to let a model read more tokens than it was made for.

    Args:
        model: of transformers, or its configuration. tokens: that it would read.
        what: opens the message, with a verb: "context 9000 passes".
        remedy: what to change.

    Raises:
        FadeError: says what passes how many positions of which model.
    """
    limit = positions_of(model)
    if limit and tokens > limit:
        name = getattr(model, "config", model).name_or_path or type(model).__name__
        raise FadeError(f"{what} the {limit} positions of {name}; {remedy}")


def _load(loader: Any, name: str | Path, **options: Any) -> Any:
    path, local = Path(name), Path(name).exists()
    if not local and (is_gguf(name) or not is_hub_id(str(name))):
        raise FadeError(
            f"model {name} does not exist; name a directory, a GGUF file or a hub id, or make the demo's with: "
            "python -m pipelines.demo_model"
        )
    place: str | Path = name
    if local and is_gguf(path):
        refuse_missing_readers()
        logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)
        place, options = path.parent, {**options, "gguf_file": path.name}
    try:
        return loader.from_pretrained(place, local_files_only=local, **options)
    except Exception as error:  # transformers, safetensors and the hub client raise many kinds
        reason = first_line(error)
        remedy = "make it again, or name another" if local else "check the id and the connection"
        raise FadeError(f"model {name} cannot be loaded: {reason}; {remedy}") from error


def is_hub_id(name: str) -> bool:
    """Tell a hub id from a path that is not there: one slash at most, and its first part is no folder here.

    Example:
        >>> is_hub_id("org/name"), is_hub_id("./models/name"), is_hub_id("a/b/c")
        (True, False, False)
    """
    parts = name.split("/")
    plain = all(part and not part.startswith((".", "~")) for part in parts)
    return plain and len(parts) <= 2 and not Path(parts[0]).exists()
