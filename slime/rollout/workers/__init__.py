"""Where groups are worked on: in the rollout's own process (`here`), or in workers of their own (`fleet`,
`episode_worker`)."""
