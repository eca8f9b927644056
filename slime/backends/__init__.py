"""Names of training that plugins of the public slime import. Nothing in slime imports them."""
