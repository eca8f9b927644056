"""Metrics with defined reductions, spans, the run folder, progress and the report.

Imports neither torch nor an engine, and optional packages (TensorBoard, W&B, matplotlib, rich) only on use.
"""
