"""Ray: where each process runs, how it is started, waited for and ended. The only room that imports ray.

Actors are shells: every method is a few lines around a plain object of another room.
"""
