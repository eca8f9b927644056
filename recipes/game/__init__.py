"""The game: sums in several turns with hints from the environment, played by an ordinary agent."""
