"""The game: sums in several turns, with the environment's hints, played by an agent that knows nothing of training."""
