"""One batch trained: what all of it decides, signals, targets, micro-batches, losses, optimizer steps, checks."""
