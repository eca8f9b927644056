"""Support for plugins of the public slime: a table of its import paths (`names`), and the functions behind them.

Only `slime/__init__.py` imports this package, for the table.
"""
