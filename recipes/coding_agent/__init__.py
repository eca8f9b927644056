"""A coding agent: repositories with a bug, a program that mends them, and hidden tests that grade."""
