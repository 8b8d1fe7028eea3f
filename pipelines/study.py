"""The old name of :mod:`pipelines.budget_study`."""

from __future__ import annotations

import sys
import warnings

from pipelines.budget_study import budget_study
from pipelines.cli import run

warnings.warn("pipelines.study is pipelines.budget_study now", DeprecationWarning, stacklevel=2)
study = budget_study

if __name__ == "__main__":
    sys.exit(run(budget_study))
