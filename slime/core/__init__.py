"""Shared code: data types passed between packages, engine interfaces, exceptions and small utilities.

Does not import other slime packages or anything heavy (torch, Ray, Megatron, SGLang), so that the driver, the tests and
the command line can import it quickly.
"""
