"""Results on disk and on the screen: JSON lines, Markdown tables, HTML pages, and the machine that they are from.

May import `data` and `predictor`; no other package of the pipelines and no command. What is measured never enters.
"""
