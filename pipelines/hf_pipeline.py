"""The old place of :mod:`pipelines.integrations.hf_pipeline`."""

from __future__ import annotations

import warnings

from pipelines.integrations.hf_pipeline import TASK, FadeTextGenerationPipeline, register_pipeline

__all__ = ["TASK", "FadeTextGenerationPipeline", "register_pipeline"]

warnings.warn("pipelines.hf_pipeline is pipelines.integrations.hf_pipeline now", DeprecationWarning, stacklevel=2)
