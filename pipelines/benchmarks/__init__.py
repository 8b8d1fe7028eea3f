"""Benchmarks: what a step, a prompt, a choice of tokens or a recording costs beside a baseline of the same run.

May import `pipelines.evaluation`, `pipelines.reporting` and `pipelines.cli`; no command. A benchmark is imported when
it is chosen: `gpu` and `tune` run where only torch, triton and transformers are installed.
"""
