"""Rollout: turns prompt groups into finished, scored groups with HTTP requests to engines.

`manager` composes the room from `factories`. A schedule (`schedules/`) makes the batch of a step, mostly with
`group_loop`, which runs groups (`execute`) through a generate function (`generate`), which sends requests to engines
(`client/`). `workers/` runs groups in several processes. `user_functions` loads and calls users' functions, which see
`context`. `evaluate` scores held-out data.
"""
