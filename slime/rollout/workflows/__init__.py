"""Hooks that generate data for losses other than the policy loss, one file per loss."""
