"""Code that all packages share: records that travel between packages, the interfaces to an engine, errors, and small
tools.

Imports nothing else of slime and nothing heavy (no torch, Ray, Megatron or SGLang), so that the driver, the tests and
the command line can import it quickly.
"""
