"""The vocabulary: records that travel between rooms, the ports between them, errors and identifiers.

Imports nothing of ours and nothing heavy (no torch, Ray, Megatron or SGLang), so that the driver, the tests and the
command line can read it at once.
"""
