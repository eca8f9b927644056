"""Hooks that generate data for other losses than the policy loss, one file each."""
