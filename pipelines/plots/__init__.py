"""Plots: rows and traces as PNG files. matplotlib comes with the `demo` extra and is imported when a plot is drawn.

May import `data`, `fade_runtime.events`, `predictor` and `pipelines.reporting`. Never in here: anything that measures.
"""
