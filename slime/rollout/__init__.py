"""Rollout: turns prompt groups into finished, scored groups by sending HTTP requests to the engines.

`manager` is the entry point and builds its components with `factories`. A schedule (`schedules/`) assembles the batch
of each step. Most schedules use `group_loop`, which runs groups (`execute`) through a generate function (`generate`)
that sends requests to the engines (`client/`). `workers/` runs groups in several processes. `user_functions` loads and
calls user functions, which access the rollout through `context`. `evaluate` scores held-out data.
"""
