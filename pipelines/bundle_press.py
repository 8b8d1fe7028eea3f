"""The old place of :mod:`pipelines.integrations.bundle_press`."""

from __future__ import annotations

import warnings

from pipelines.integrations.bundle_press import BundlePress

__all__ = ["BundlePress"]

warnings.warn("pipelines.bundle_press is pipelines.integrations.bundle_press now", DeprecationWarning, stacklevel=2)
