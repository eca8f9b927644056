"""A coding agent, trained from outside: repositories with a bug, a program that mends them, hidden tests that grade."""
