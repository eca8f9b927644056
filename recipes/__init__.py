"""Runs that are kept working: each folder prepares its data and says how it is started."""
