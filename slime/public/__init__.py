"""What exists for plugins of the public slime: a table of its import paths (`names`), and the functions behind them.

Nothing else of ours imports this package, but `slime` itself, which asks for the table.
"""
