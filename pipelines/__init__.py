"""Composition roots: each module is a command, `python -m pipelines.NAME`."""
