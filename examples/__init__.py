"""Small, complete examples of slime's hooks, to copy from."""
