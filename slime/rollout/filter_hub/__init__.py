"""Public names of the built-in filters, for plugins."""
