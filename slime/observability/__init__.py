"""What a run says about itself: metrics that know how to reduce, spans, the run folder, progress and the report.

Imports no torch and no engine. Everything optional (TensorBoard, W&B, matplotlib, rich) is imported where it is used.
"""
