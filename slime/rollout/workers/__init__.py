"""Runs groups in the rollout's own process (`episodes`), or in worker processes (`worker_fleet`, `episode_worker`)."""
