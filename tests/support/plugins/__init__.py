"""Plugins written for the public slime, one file per kind, by its names alone. `tests/e2e/test_plugins.py` runs them.

Nothing here knows of engine clients, keys, weight versions or records of this package.
"""
