"""The command line of slime: `python -m slime.cli.<tool>`."""
