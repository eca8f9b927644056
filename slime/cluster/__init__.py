"""Runs slime on Ray: places, starts, awaits and stops each process. Only this package imports ray.

Actors are thin wrappers: every method is a few lines around a plain object of a different package.
"""
