"""Observability of a run: metrics with a defined reduction, spans, the run folder, progress and the report.

Does not import torch or engines. Imports optional packages (TensorBoard, W&B, matplotlib, rich) only where needed.
"""
