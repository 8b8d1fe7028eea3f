"""Integrations: the cache inside other libraries: transformers' pipelines, kvpress, MLflow.

May import `fade_runtime`, `predictor`, `data` and `pipelines.evaluation`; no command. Modules are imported by name, for
each of them needs a library that others do without.
"""
