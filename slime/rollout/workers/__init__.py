"""Runs groups in the rollout process itself (`episodes`) or in worker processes (`worker_fleet`, `episode_worker`)."""
