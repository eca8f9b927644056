"""Rollout: from prompt groups to finished, scored groups, by HTTP requests to engines.

`manager` composes the room from `parts`. A schedule (`schedules/`) makes the batch of a step, mostly with `group_loop`,
which runs groups (`execute`) through a generate function (`generate`), which asks engines (`client/`). `workers/` does
so in several processes. `user_functions` loads and calls users' functions, which see `context`. `evaluate` scores
held-out data.
"""
