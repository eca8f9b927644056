"""Records of a run: metrics with a defined reduction, spans, the run folder, progress and the report.

Imports no torch and no engine. Optional packages (TensorBoard, W&B, matplotlib, rich) are imported where they are used.
"""
