"""Policy losses per token, before any aggregation."""
