"""Ray: where each process runs, and how it is started, awaited and ended. Only this room imports ray.

Actors are shells: every method is a few lines around a plain object of another room.
"""
