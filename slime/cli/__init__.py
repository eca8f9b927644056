"""The command line beside `train.py`: `slime doctor`, `slime report`, `slime trace`, `slime schemas`."""
