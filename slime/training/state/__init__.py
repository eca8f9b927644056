"""Loads, saves, offloads and exports a rank's weights and optimizer states."""
