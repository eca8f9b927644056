"""The game: an agent plays reasoning-gym questions in several turns, against the environment's hints, and learns to."""
