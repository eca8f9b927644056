"""Public names of the Megatron backend, for plugins."""
