"""Tested runs: each folder has the code that prepares and starts one run."""
