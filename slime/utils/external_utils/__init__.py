"""Public names of launchers, for plugins."""
