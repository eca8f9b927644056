"""Training on one batch: schedule, forward passes, micro-batches, losses, optimizer steps, checks."""
