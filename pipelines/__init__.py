"""Composition roots: the modules here are commands, `python -m pipelines.NAME`, and what all commands share.

Commands import the packages below them, benchmarks and integrations, then evaluation and plots, then reporting; these
import no command. `cli` turns a function into a command, `checkpoints` reads what `lightning fit` wrote.

The variables below are read by libraries at import, so they are set here, before any command imports one:
no telemetry, and no progress bars or log lines of libraries between those of the commands.
"""

import os

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(_name, _value)
