"""Evaluation: compressed caches beside the full one, on texts and on tasks; their losses, bytes and answers as rows.

May import `data`, `fade_runtime`, `predictor` and `pipelines.reporting`. Never in here: commands, pictures, other
libraries' entry points. Modules are imported by name; `tasks` knows nothing of the others.
"""
