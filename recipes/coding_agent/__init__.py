"""A coding agent: repositories with a bug, a program that repairs them, and hidden tests that grade the result."""
