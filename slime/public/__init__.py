"""Compatibility with plugins written for the public slime: its import paths (`names`) and the functions behind them.

Only `slime/__init__.py` imports this package, for its table of import paths.
"""
