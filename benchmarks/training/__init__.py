"""The parts of `benchmarks/train.py`: shapes and batches, one rank of a run, what a rank measures, its profile."""
