"""Small, complete uses of slime's hooks, to copy from."""
