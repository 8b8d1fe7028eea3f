"""transformers' `pipeline("fade-text-generation")`: text generation with a compressed cache in each call."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from data.lm import copy_off_memory_map
from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines.integrations.presets import read_config
from predictor.errors import FadeError

TASK = "fade-text-generation"
MEMORY = ("resident_bytes", "full_bytes")


class FadeTextGenerationPipeline(TextGenerationPipeline):
    """What "text-generation" does, with strings, chats and lists of them, over a tiered cache.

    Three options more, when the pipeline is made or called:
        fade_config: safe, balanced, aggressive, a YAML file or a dict of FadeConfig's options, or a FadeConfig; by
            default balanced with a predictor, else safe.
        predictor: `models:/NAME@alias`, `models:/NAME/3`, a bundle directory, a hub id, or a loaded predictor.
        return_memory: give each answer a "memory": resident_bytes, full_bytes and compression of the cache of its
            batch, after the answer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.model.device.type == "cpu":
            copy_off_memory_map(self.model)

    def _sanitize_parameters(
        self, fade_config: Any = None, predictor: Any = None, return_memory: bool | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        if fade_config is not None or predictor is not None:
            forward["fade_config"] = read_config(fade_config, predictor)
        if return_memory is not None:
            postprocess["return_memory"] = return_memory
        return preprocess, forward, postprocess

    def _forward(
        self, model_inputs: dict[str, Any], fade_config: FadeConfig | None = None, **options: Any
    ) -> dict[str, Any]:
        cache = create_tiered_cache(self.model, fade_config)
        named = forward_kwargs(cache, self.model)
        if caches := sorted({"cache", "past_key_values"} & set(options)):
            raise FadeError(f"{caches[0]} is given, but {TASK} makes a cache for each call; use 'text-generation'")
        outputs = super()._forward(model_inputs, **named, **options)
        report = cache.memory_report()
        rows = len(outputs["generated_sequence"])
        return {**outputs, "memory": torch.tensor([[report[name] for name in MEMORY]] * rows)}

    def postprocess(self, model_outputs: dict[str, Any], return_memory: bool = False, **options: Any) -> Any:
        """Turn tokens into records; with their memory, if ``return_memory`` says so."""
        memory = dict(zip(MEMORY, model_outputs.pop("memory")[0].tolist()))
        records = super().postprocess(model_outputs, **options)
        if return_memory:
            memory["compression"] = memory["full_bytes"] / memory["resident_bytes"]
            records = [{**record, "memory": memory} for record in records]
        return records


def register_pipeline() -> None:
    """Make the task "fade-text-generation" known to ``transformers.pipeline``; once is enough.

    Example:
        >>> from transformers.pipelines import PIPELINE_REGISTRY
        >>> register_pipeline()
        >>> "fade-text-generation" in PIPELINE_REGISTRY.get_supported_tasks()
        True
    """
    if TASK not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            TASK, pipeline_class=FadeTextGenerationPipeline, pt_model=AutoModelForCausalLM, type="text"
        )
