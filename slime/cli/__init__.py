"""The command line: `slime <command>`, one file per command (`slime/cli/main.py` has the table)."""
