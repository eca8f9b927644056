"""One batch trained: schedule, forward passes, micro-batches, losses, optimizer steps, checks."""
