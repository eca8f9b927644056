"""Runs slime on Ray: places, starts, monitors and stops its processes. Only this package imports ray.

Actors are thin wrappers: every method is a few lines around a plain object from another package.
"""
