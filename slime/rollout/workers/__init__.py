"""Where groups are worked on: in the rollout's own process (`episodes`), or in worker processes (`worker_fleet`,
`episode_worker`).
"""
